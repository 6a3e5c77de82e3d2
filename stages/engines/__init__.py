"""Engines that sample, score and train, each in a process of its own, behind one protocol of plain types."""
