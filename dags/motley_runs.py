"""One Airflow DAG per training run that is registered in this deployment's home."""

from __future__ import annotations

import os

from airflow.sdk import get_parsing_context

from plugins.iteration_dag import build_run_dags
from stages.home import MotleyHome
from stages.run_entry import list_run_entries

home = MotleyHome.from_environment(os.environ)
globals().update(build_run_dags(list_run_entries(home.runs_dir), wanted=get_parsing_context().dag_id))
