"""What Motley adds to Airflow's processes; registered by the entry point `airflow.plugins`, never by folder.

The scheduler loads plugins before it forks its workers, the DAG processor before it forks a parser: what is imported
here need not be imported again by every single task, between the end of one stage and the start of the next one.
"""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

import plugins.iteration_dag
import plugins.policy_trigger  # noqa: F401 - imported for the forks, as said above
from plugins.timetable import IterationTimetable


class MotleyPlugin(AirflowPlugin):
    """Registers the iteration timetable with the core processes."""

    name = "motley"
    timetables = [IterationTimetable]
