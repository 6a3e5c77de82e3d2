"""How long Airflow's processes wait for each other's writes to an SQLite metadata database.

Airflow imports what `[database] sql_alchemy_connect_args` names and hands it to the driver.
"""

from __future__ import annotations

from typing import Final

CONNECT_ARGS: Final[dict[str, float]] = {"timeout": 60.0}
"""Seconds before `database is locked`. The driver's default of 5 is too short while engines use every core: a writer
that gets no processor keeps its lock, and the API answers with status 500 (seen with Airflow 3.3.2)."""
