"""The page *Cluster*: Airflow's components, workers and queues, and how fast each machine was measured to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter, Request

from plugins.pages.access import WorkerState
from plugins.pages.arriving import ArrivingPage
from plugins.pages.faults import PageError
from plugins.pages.render import Pages
from plugins.pages.run_source import NamedRun, PageRun
from stages.home import dag_id_of
from storage.errors import ObjectMissingError, StorageError
from storage.names import escape_name
from storage.runs import read_profile

_LATE_S: Final = 50.0
"""Age of a heartbeat from which a worker counts as missed: five of its intervals."""

_GONE: Final = frozenset({"unknown", "offline", "offline maintenance"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What the newest profile says of a machine."""

    run: str
    """Run for which it was measured."""
    machine: str
    """Machine."""
    queue: str
    """Its queue."""
    region: str
    """Its region."""
    is_drained: bool
    """Whether the run gives it no work."""
    iteration: int | None
    """Iteration at which it was measured; None where it was not."""
    document: Mapping[str, Any]
    """The profile; empty without one."""


def routes(pages: Pages) -> APIRouter:
    """Return the routes of this page."""
    router = APIRouter()

    @router.get("/cluster", name="cluster")
    def cluster(request: Request) -> ArrivingPage:
        def facts() -> dict[str, Any]:
            workers = pages.access.workers()
            speeds, faults = _speeds(pages)
            return {
                "components": pages.access.components(), "workers": workers,
                "health": {w.name: health_of(w, datetime.now(UTC)) for w in workers or ()},
                "queues": pages.access.queues(), "speeds": speeds, "faults": faults,
                "runs": [(entry.run, dag_id_of(entry.run)) for entry in pages.source.runs()],
            }  # fmt: skip

        return pages.page(request, "cluster", facts, heading="Cluster")

    return router


def health_of(worker: WorkerState, now: datetime) -> str:
    """Return what is wrong with a worker, in a sentence; empty when nothing is."""
    if worker.state in _GONE:
        return f"gone: `motley up` or `motley worker --machine {worker.name}` starts it again"
    if worker.last_heartbeat is None:
        return "has never reported itself"
    age = (now - worker.last_heartbeat).total_seconds()
    if age > _LATE_S:
        return f"last heard of {age:.0f} s ago; its machine may be gone"
    if "maintenance" in worker.state:
        return "in maintenance: takes no new tasks"
    return ""


def speeds_of(run: PageRun) -> list[Speed]:
    """Return the newest measurement of each machine of a run, in cluster order."""
    entry = run.entry
    every = entry.profile_every
    due = run.done - run.done % every if every else entry.first_iteration
    regular = range(due, max(due - 2 * every, entry.first_iteration) - 1, -every) if every else ()
    candidates = dict.fromkeys([*regular, entry.reprofile_at, entry.first_iteration])
    found = []
    for machine in entry.machines:
        number, document = _newest(run, list(candidates), escape_name(machine.queue))
        found.append(
            Speed(
                run=run.name,
                machine=machine.name,
                queue=machine.queue,
                region=machine.region,
                is_drained=machine.name in entry.drained,
                iteration=number,
                document=document,
            )
        )
    return found


def _newest(run: PageRun, numbers: list[int], queue: str) -> tuple[int | None, Mapping[str, Any]]:
    for number in numbers:
        try:
            return number, read_profile(run.store, run.name, number, queue)
        except ObjectMissingError:
            continue
    return None, {}


def _speeds(pages: Pages) -> tuple[list[Speed], list[str]]:
    """Return the speeds of the machines of all runs, and a sentence for each run that can't be read."""
    speeds, faults = [], []
    for entry in pages.source.runs():
        try:
            speeds += speeds_of(pages.source.find(NamedRun(dag_id=dag_id_of(entry.run), entry=entry)))
        except (PageError, StorageError) as error:
            faults.append(f"Run {entry.run}: {error}")
    return speeds, faults
