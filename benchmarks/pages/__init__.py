"""Benchmarks of the pages in Airflow's UI."""
