"""Benchmarks that anyone can run; each writes JSON with machine, commit and versions."""
