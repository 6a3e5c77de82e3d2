"""Benchmarks of the planner; see README.md."""
