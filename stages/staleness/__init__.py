"""Asynchronous iterations: how far generation runs ahead, which rollouts are trained on, who waits for whom."""
