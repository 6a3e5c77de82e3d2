"""Benchmark of training steps; see README.md."""
