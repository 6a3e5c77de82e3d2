"""One Airflow DAG per training run that is registered in this deployment's home."""

from __future__ import annotations

import os

from airflow.sdk import get_parsing_context

from plugins.run_dags import find_run_dags

globals().update(find_run_dags(os.environ, wanted=get_parsing_context().dag_id))
