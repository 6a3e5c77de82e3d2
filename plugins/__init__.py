"""Everything that imports Airflow, apart from the wiring in `dags/`: timetable, operators, triggers, retry policy."""
