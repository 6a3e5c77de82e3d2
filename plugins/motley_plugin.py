"""What Motley adds to Airflow's processes; registered by the entry point `airflow.plugins`, never by folder."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from plugins.timetable import IterationTimetable


class MotleyPlugin(AirflowPlugin):
    """Registers the iteration timetable with the core processes."""

    name = "motley"
    timetables = [IterationTimetable]
