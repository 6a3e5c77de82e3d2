"""Synchronous against asynchronous runs."""
