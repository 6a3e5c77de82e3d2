"""What an Edge worker tells the deployment about its machine; shown in Airflow's UI under Admin, Edge Worker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from datetime import datetime

from stages.home import WORKER_VARIABLE, MotleyHome

Facts = dict[str, str | int | float | datetime]


async def machine_facts() -> Facts:
    """Return the machine of the cluster file that this worker works for, and the room on its disk.

    Called by the worker with every heartbeat (setting `[edge] extended_system_info_function`).
    """
    free_gb = await asyncio.to_thread(_free_gb)
    return {**worker_facts(os.environ.get(WORKER_VARIABLE)), "disk_free_gb": free_gb}


def worker_facts(text: str | None) -> Facts:
    """Return the machine's facts of the worker's environment variable; empty without one."""
    if not text:
        return {}
    machine = json.loads(text)
    return {
        "machine": machine["machine"],
        "region": machine["region"],
        "gpu": machine["gpu"],
        "gpu_count": machine["count"],
        "roots": " ".join(machine["roots"]),
    }


def _free_gb() -> float:
    home = MotleyHome.from_environment(os.environ).path
    return round(shutil.disk_usage(home if home.exists() else "/").free / 1e9, 2)
