"""Pages about runs, rollouts, plans and machines, served by Airflow's API server and nowhere else."""
