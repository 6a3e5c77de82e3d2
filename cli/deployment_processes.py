"""Finding and ending the processes of a deployment: by recorded pid and start time, and by their environment's mark.

The mark reaches what no record knows: children of a scheduler that was killed, stage processes whose starter died,
engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psutil

from cli.deployment_record import ComponentProcess, DeploymentRecord
from stages.home import DEPLOYMENT_VARIABLE, PART_VARIABLE

AIRFLOW_PART = "airflow"
"""Value of `MOTLEY_PART` for Airflow's processes."""

START_TIME_TOLERANCE_S = 2.0
"""Start times are computed from the boot time, which a clock adjustment shifts."""


def component_process(component: ComponentProcess) -> psutil.Process | None:
    """Return the running process of a component, None if it is gone or its pid belongs to another one."""
    try:
        process = psutil.Process(component.pid)
        is_same = abs(process.create_time() - component.started_at) <= START_TIME_TOLERANCE_S
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def running_components(record: DeploymentRecord) -> list[ComponentProcess]:
    """Return the components whose process runs."""
    return [component for component in record.processes if component_process(component) is not None]


def listens(component: ComponentProcess, port: int) -> bool:
    """Whether a component, or a child of it, is the one that listens on a port.

    A deployment that answers there may be another one: two that start at once can choose the same free port.
    """
    process = component_process(component)
    if process is None:
        return False
    with suppress(psutil.Error):
        for member in (process, *process.children(recursive=True)):
            connections = member.net_connections(kind="tcp")
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return True
    return False


def marked_processes(deployment_id: str, *, part: str | None = None) -> list[psutil.Process]:
    """Return the processes that carry a deployment's mark, never the caller or its ancestors.

    Args:
        deployment_id: The record's id.
        part: Only of this part (`airflow` or `stage`); None means all.
    """
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [p for p in psutil.process_iter() if p.pid not in own and _has_mark(p, deployment_id, part)]


def end_processes(processes: Sequence[psutil.Process], *, grace_s: float) -> list[psutil.Process]:
    """End processes with SIGTERM, after `grace_s` (at once if 0) with SIGKILL; return those that are still there."""
    alive = list(processes)
    if grace_s > 0:
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(alive, timeout=grace_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=5.0)
    return [process for process in alive if not _is_zombie(process)]


def end_airflow(record: DeploymentRecord, *, grace_s: float) -> list[psutil.Process]:
    """End Airflow's processes of a deployment and nothing else; return those that are still there.

    With `grace_s` 0 they are killed at once, so that tasks have no chance to end their stage processes on the way.
    """
    recorded = [p for component in record.processes if (p := component_process(component)) is not None]
    left = end_processes(recorded, grace_s=grace_s)
    # Local workers and task runners whose scheduler is gone.
    return [*left, *_end_until_none(record.id, AIRFLOW_PART, grace_s=min(grace_s, 2.0))]


def end_stages(record: DeploymentRecord, *, grace_s: float) -> list[psutil.Process]:
    """End stage processes and engines of a deployment; return those that are still there."""
    return _end_until_none(record.id, None, grace_s=grace_s)


def _end_until_none(deployment_id: str, part: str | None, *, grace_s: float) -> list[psutil.Process]:
    left: list[psutil.Process] = []
    for _ in range(3):  # an ending process may have started another one in the meantime
        found = marked_processes(deployment_id, part=part)
        if not found:
            return []
        left = end_processes(found, grace_s=grace_s)
    return left


def _has_mark(process: psutil.Process, deployment_id: str, part: str | None) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        environment = process.environ()
    except (psutil.Error, OSError):
        return False
    return environment.get(DEPLOYMENT_VARIABLE) == deployment_id and part in (None, environment.get(PART_VARIABLE))


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def describe(processes: Iterable[psutil.Process]) -> str:
    """Return processes as text for a message."""
    return ", ".join(f"{process.pid}" for process in processes)
