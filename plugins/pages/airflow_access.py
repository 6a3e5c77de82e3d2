"""The pages' view of the Airflow that serves them: its guards, its database, its health."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from airflow.api.common.airflow_health import get_airflow_health
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity
from airflow.api_fastapi.core_api.security import get_user, requires_access_dag, requires_access_view
from airflow.configuration import conf
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import TaskInstanceState
from sqlalchemy import func, select

from plugins.pages.access import Access, QueueState, WorkerState
from plugins.pages.faults import PageError
from stages.home import DAG_PREFIX, iteration_of

_WAITING: Final = (TaskInstanceState.SCHEDULED, TaskInstanceState.QUEUED)
_COUNTED: Final = (*_WAITING, TaskInstanceState.RUNNING)


def airflow_access() -> Access:
    """Return the access that this process's Airflow gives."""
    return Access(
        is_signed_in=get_user,
        may_see_run=requires_access_dag(method="GET", access_entity=DagAccessEntity.RUN),
        may_see_cluster=requires_access_view(access_view=AccessView.JOBS),
        login_url=_login_url,
        iteration_of=_iteration_of,
        components=_components,
        workers=_workers,
        queues=_queues,
    )


def _login_url(back: str) -> str:
    start = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")
    return f"{start}/api/v2/auth/login?next={quote(back, safe='')}"


def _iteration_of(dag_id: str, run_id: str) -> int:
    with create_session() as session:
        query = select(DagRun.logical_date).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        found = session.execute(query).one_or_none()
    if found is None:
        raise PageError(f"DAG {dag_id} has no DAG run {run_id!r}; look at its grid for those there are.")
    try:
        return iteration_of(found[0])
    except ValueError as error:
        raise PageError(f"DAG run {run_id!r} of {dag_id} is no iteration: {error}.") from error


def _components() -> Mapping[str, str | None]:
    return {name: facts.get("status") for name, facts in get_airflow_health().items()}


def _workers() -> tuple[WorkerState, ...] | None:
    if not conf.getboolean("edge", "api_enabled", fallback=False):
        return None
    from airflow.providers.edge3.models.edge_worker import EdgeWorkerModel

    with create_session() as session:
        found = session.scalars(select(EdgeWorkerModel).order_by(EdgeWorkerModel.worker_name)).all()
        return tuple(
            WorkerState(
                name=worker.worker_name,
                state=str(getattr(worker.state, "value", worker.state)),
                queues=tuple(worker.queues or ()),
                last_heartbeat=worker.last_update,
                jobs_active=worker.jobs_active or 0,
                facts=dict(worker.sysinfo or {}),
            )
            for worker in found
        )


def _queues() -> tuple[QueueState, ...]:
    query = (
        select(TaskInstance.queue, TaskInstance.state, func.count())
        .where(TaskInstance.dag_id.startswith(DAG_PREFIX, autoescape=True), TaskInstance.state.in_(_COUNTED))
        .group_by(TaskInstance.queue, TaskInstance.state)
    )
    waiting: dict[str, int] = {}
    running: dict[str, int] = {}
    with create_session() as session:
        for found, state, count in session.execute(query):
            queue = str(found)
            counted = running if state == TaskInstanceState.RUNNING else waiting
            counted[queue] = counted.get(queue, 0) + count
    names = sorted({*waiting, *running})
    return tuple(QueueState(queue=n, waiting=waiting.get(n, 0), running=running.get(n, 0)) for n in names)
