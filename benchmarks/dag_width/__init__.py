"""Width of a run's DAG."""
