"""What Motley adds to Airflow's processes; registered by the entry point `airflow.plugins`, never by folder.

The scheduler loads plugins before it forks its workers, the DAG processor before it forks a parser: what is imported
here need not be imported again by every single task, between the end of one stage and the start of the next one. The
pages are none of that: `plugins.page_mount` imports them in the API server, at their first request.
"""

from __future__ import annotations

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

import plugins.iteration_dag
import plugins.policy_trigger  # noqa: F401 - imported for the forks, as said above
from plugins.page_mount import URL_PREFIX, LazyPages, external_views
from plugins.timetable import IterationTimetable


class MotleyPlugin(AirflowPlugin):
    """Registers the iteration timetable with the core processes, and the pages with the API server."""

    name = "motley"
    timetables = [IterationTimetable]
    fastapi_apps = [{"app": LazyPages(), "url_prefix": URL_PREFIX, "name": "Motley pages"}]
    external_views = external_views(conf.get("api", "base_url", fallback=""))
