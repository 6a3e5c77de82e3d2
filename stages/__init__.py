"""What a stage of an RL iteration does, as plain Python processes that know nothing of Airflow."""
