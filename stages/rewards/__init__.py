"""Rewards: verifiers, one per file, and the processes in which they run."""
