"""What a missed deadline of an iteration starts: a look, in the triggerer, at whether the run still moves.

How long an iteration takes is not known when its DAG run is made, so Airflow's deadline alert (3.3: a fixed time after
the DAG run was queued) only begins the watch. From then on the run's own records decide: it is stalled when none came
for ten times the usual seconds. The watch ends with the iteration, or when Airflow has given the DAG run up.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from asgiref.sync import sync_to_async

from plugins.alert_callbacks import STALLED, store_of
from plugins.alert_delivery import deliver
from plugins.store_connections import store_options
from stages.errors import ContractError
from stages.home import MotleyHome, iteration_of
from stages.run_entry import RunEntry, read_run_entry
from stages.stall import last_word, stall_limit_s, who_waits_now
from storage.alerts import Alert
from storage.errors import StorageError
from storage.iterations import records_of
from storage.policies import head_version
from storage.regional_view import view_of
from storage.store import open_store

logger = logging.getLogger(__name__)

CALLBACK: Final = "plugins.stall_watch.watch_iteration"
"""Path of the callback, as a deadline alert names it."""

_RECORDS: Final = 6
"""Records before the iteration that are looked at."""

_SHORTEST_S: Final = 2.0
_LONGEST_S: Final = 300.0
"""Bounds of the pause between two looks, seconds."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look has seen."""

    is_done: bool
    """Whether the iteration's policy is committed."""
    silence_s: float
    """Seconds since the last report of the run, or since the DAG run was queued."""
    limit_s: float
    """Seconds of silence from which the run counts as stalled."""
    head: int | None
    """Newest committed policy version."""
    waits: str = ""
    """Which side waits for the other, if the run is stalled."""

    @property
    def is_stalled(self) -> bool:
        """Whether the run is stalled."""
        return not self.is_done and self.silence_s > self.limit_s


async def watch_iteration(run: str, context: Mapping[str, Any]) -> str:
    """Watch an iteration until it ends; raise an alert when, and as long as, the run is stalled.

    Args:
        run: Run name.
        context: What Airflow hands over: the DAG run as its REST API shows it, and the deadline.

    Returns:
        How it ended, for the callback's record in Airflow.
    """
    dag_run = context["dag_run"]
    iteration = iteration_of(datetime.fromisoformat(dag_run["logical_date"]))
    queued_at = datetime.fromisoformat(dag_run["queued_at"] or dag_run["run_after"])
    while (state := await _state(dag_run)) not in ("success", "failed"):
        try:
            seen = await asyncio.to_thread(look, run, iteration, queued_at)
        except (StorageError, ContractError) as error:
            logger.warning("run %s can't be looked at now: %s", run, error)
            await asyncio.sleep(_LONGEST_S)
            continue
        if seen.is_done:
            return f"iteration {iteration} is committed"
        if seen.is_stalled:
            # With asgiref's threads: hooks of notifiers talk to Airflow through this loop.
            await sync_to_async(_tell, thread_sensitive=False)(run, iteration, seen, context)
        await asyncio.sleep(min(_LONGEST_S, max(_SHORTEST_S, seen.limit_s - seen.silence_s)))
    return f"the DAG run of iteration {iteration} ended: {state}"


def look(run: str, iteration: int, queued_at: datetime) -> Look:
    """Return how long a run has been silent.

    Args:
        run: Run name.
        iteration: Iteration that has not ended.
        queued_at: When its DAG run was queued; a run that was stopped for days is not silent since then.

    Raises:
        StorageError: its records can't be read.
        ContractError: its entry is gone or unusable.
    """
    entry = read_run_entry(MotleyHome.from_environment(os.environ).run_entry_file(run))
    store = store_of(entry)
    head = head_version(store, run)
    newest = iteration if head is None else min(iteration, head)
    first = max(entry.first_iteration, newest - _RECORDS)
    records = records_of(store, run, range(first, newest + 1))
    since = max(queued_at, last_word(records) or queued_at)
    seen = Look(
        is_done=head is not None and head > iteration,
        silence_s=(datetime.now(UTC) - since).total_seconds(),
        limit_s=stall_limit_s(records, entry.stall_check_s),
        head=head,
    )
    return replace(seen, waits=_who_waits(entry, head)) if seen.is_stalled else seen


def _who_waits(entry: RunEntry, head: int | None) -> str:
    stores = [open_store(entry.roots[region], **store_options(entry, region)) for region in entry.regions]
    return who_waits_now(view_of(stores), entry.run, head)


def _tell(run: str, iteration: int, seen: Look, context: Mapping[str, Any]) -> None:
    entry = read_run_entry(MotleyHome.from_environment(os.environ).run_entry_file(run))
    now = "no policy is" if seen.head is None else f"policy version {seen.head} is the newest that is"
    sentence = (
        f"run {run}, iteration {iteration}: no iteration ended for {seen.silence_s:.0f} s (stalled from "
        f"{seen.limit_s:.0f} s on), and {now} committed: {seen.waits}; `motley doctor {run}` says what it waits for "
        f"(a machine without a worker, a paused DAG), the task's log what it does; `motley stop {run}`, then "
        f"`motley resume {run}`, starts the iteration again"
    )
    raised = Alert(
        run=run, iteration=iteration, kind=STALLED, matter=f"{STALLED}-{seen.head or 0:06d}", sentence=sentence,
        raised_at=datetime.now(UTC),
    )  # fmt: skip
    deliver(raised, store_of(entry), context)


async def _state(dag_run: Mapping[str, Any]) -> str:
    """Return the state of the DAG run now; where Airflow can't be asked, that at the deadline."""
    # What runs tasks; processes that only read DAGs need none of it.
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    try:
        found = await sync_to_async(RuntimeTaskInstance.get_dagrun_state, thread_sensitive=False)(
            dag_id=dag_run["dag_id"], run_id=dag_run["dag_run_id"]
        )
    except Exception as error:  # noqa: BLE001 - the state only ends the watch early
        logger.warning("state of %s %s is unknown: %s", dag_run["dag_id"], dag_run["dag_run_id"], error)
        return str(dag_run["state"])
    return str(found)
