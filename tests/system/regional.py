"""Looking at regions on this computer when all is down again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

from scripts.regions.airflow import left_over
from scripts.regions.layout import Regions, document
from scripts.regions.network import same_process


def assert_nothing_runs(layout: Regions, folder: Path) -> None:
    """No process of the deployment or of the regions lives, no namespace is left, and nothing says that one is."""
    assert left_over(layout) == []
    assert [pid for pid, since in layout.processes if _lives(pid, since)] == []
    assert not document(folder).exists()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    assert layout.mark not in listed


def _lives(pid: int, since: float) -> bool:
    process = same_process(pid, since)
    try:
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
