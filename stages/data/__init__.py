"""Datasets: rows from any source, their identity, split, order and token ids; pure, without torch."""
