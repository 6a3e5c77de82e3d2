"""What the pages take from Airflow: who may see what, which iteration a DAG run is, and the state of workers.

The pages know this interface only; `plugins.pages.airflow_access` is the one behind it in a deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Dependency = Callable[..., Any]
"""A FastAPI dependency that raises an HTTPException for whom it refuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """An Edge worker as Airflow knows it."""

    name: str
    """Name of the worker, which is that of its machine."""
    state: str
    """State, e.g. idle, running, unknown."""
    queues: tuple[str, ...]
    """Queues that it serves."""
    last_heartbeat: datetime | None
    """When it was last heard of, UTC."""
    jobs_active: int
    """Tasks that it runs."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What it says of its machine: region, gpu, gpu_count, disk_free_gb ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueState:
    """Task instances of Motley's DAGs on one queue."""

    queue: str
    """Name of the queue."""
    waiting: int
    """Tasks that are scheduled or queued."""
    running: int
    """Tasks that run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Guards and facts of one Airflow."""

    is_signed_in: Dependency
    """Refuses whoever is not signed in to Airflow."""
    may_see_run: Dependency
    """Refuses whoever may not read the runs of the DAG in the path parameter `dag_id`."""
    may_see_cluster: Dependency
    """Refuses whoever may not see Airflow's jobs and workers."""
    login_url: Callable[[str], str]
    """Returns where to sign in, given the address to come back to."""
    iteration_of: Callable[[str, str], int]
    """Returns the iteration of a DAG run, given DAG id and run id; raises `PageError`."""
    components: Callable[[], Mapping[str, str | None]]
    """Returns the state of each of Airflow's components; `healthy` if it is."""
    workers: Callable[[], tuple[WorkerState, ...] | None]
    """Returns the Edge workers by name; None where tasks run beside the scheduler."""
    queues: Callable[[], tuple[QueueState, ...]]
    """Returns the queues that have tasks."""
