"""Benchmarks of storage; see README.md."""
