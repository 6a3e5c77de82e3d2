"""Airflow's callbacks of a run's tasks: alarms of a report, and tasks that failed for good, become alerts.

They run where the task ran, or in the DAG processor if the task's process was killed. They are plain functions: of a
callback only its presence is in the serialised DAG, so they make no DAG versions.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from airflow.sdk import Context

from plugins.alert_delivery import deliver
from plugins.policy_gate import PolicyGateOperator
from plugins.store_connections import store_options
from stages.alarm_names import KINDS_FIELD, NON_FINITE
from stages.errors import DeadlineError, NumericsError, StageError
from stages.home import iteration_of
from stages.run_entry import RunEntry
from storage.alerts import ALARM_MATTER, Alert
from storage.errors import StorageError
from storage.runs import IterationRecord, read_iteration
from storage.store import Store, open_store

logger = logging.getLogger(__name__)

FAILED: Final = "failed"
"""Kind of the alert about a task that failed for good."""

STALLED: Final = "stalled"
"""Kind of the alert about a run, or a wait, that does not move."""


def report_done(context: Context) -> None:
    """Raise an alert for every alarm of the iteration that was reported."""
    run, iteration = _subject(context)
    try:
        store = _store(context)
        record = read_iteration(store, run, iteration)
    except StorageError:
        logger.exception("alarms of run %s, iteration %d, can't be read", run, iteration)
        return
    for raised in alerts_of(record):
        deliver(raised, store, context)


def stage_failed(context: Context) -> None:
    """Raise an alert for a task that failed and is not tried again."""
    run, iteration = _subject(context)
    ti, why = context["ti"], context.get("exception")
    what = _said(why) if why is not None else "its process ended without a word (killed, or out of memory?)"
    sentence = (
        f"run {run}, iteration {iteration}: task {ti.task_id} failed for good at try {ti.try_number}: {what}; "
        f"remove the cause, then `motley resume {run}`"
    )
    subject = f"{context.get('run_id')} {ti.task_id} {ti.try_number}"
    raised = Alert(
        run=run,
        iteration=iteration,
        kind=_kind(why),
        matter=f"{FAILED}-{iteration:06d}-{hashlib.sha256(subject.encode()).hexdigest()[:12]}",
        sentence=sentence,
        raised_at=datetime.now(UTC),
    )
    try:
        deliver(raised, _store(context), context)
    except StorageError:
        logger.exception("ALERT %s, not delivered: %s", raised.kind, raised.sentence)


def alerts_of(record: IterationRecord) -> list[Alert]:
    """Return an alert for every alarm of an iteration's record; an alarm that lasts is one matter."""
    kinds: Sequence[str] = record.metadata.get(KINDS_FIELD, ())
    now = datetime.now(UTC)
    return [
        Alert(
            run=record.run,
            iteration=record.iteration,
            kind=kind,
            matter=f"{ALARM_MATTER}{kind}",
            sentence=f"run {record.run}, iteration {record.iteration}: {sentence}",
            raised_at=now,
        )
        for kind, sentence in zip(kinds, record.alarms, strict=False)  # records of older code have no kinds
    ]


def store_of(entry: RunEntry) -> Store:
    """Return the store with a run's records, opened as its stages open it."""
    return open_store(entry.root, **store_options(entry, entry.control.region))


def _subject(context: Context) -> tuple[str, int]:
    """Return the run and the iteration that a callback is about."""
    task: Any = context["task"]
    run = task.run_name if isinstance(task, PolicyGateOperator) else task.entry.run
    return run, iteration_of(context["dag_run"].logical_date)


def _store(context: Context) -> Store:
    task: Any = context["task"]
    if isinstance(task, PolicyGateOperator):
        return open_store(task.root, **task.storage_options)
    return store_of(task.entry)


def _kind(why: object) -> str:
    if isinstance(why, NumericsError):
        return NON_FINITE
    return STALLED if isinstance(why, DeadlineError) else FAILED


def _said(why: object) -> str:
    if not isinstance(why, BaseException):
        return str(why)
    return str(why) if isinstance(why, StageError | StorageError) else f"{type(why).__name__}: {why}"
