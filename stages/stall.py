"""When a run that says nothing counts as stalled: after ten times the usual seconds of its last iterations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from statistics import median
from typing import Final

from storage.iterations import find_shards
from storage.layout import Split
from storage.rollout_schema import Family
from storage.runs import IterationRecord
from storage.store import Store

STALLED_FACTOR: Final = 10.0
"""Times the usual seconds of an iteration after which a run without a new record counts as stalled."""

STALLED_AT_LEAST_S: Final = 600.0
"""Seconds that no run counts as stalled before, where the job says nothing else."""

_RECENT: Final = 5
"""Iterations that say what is usual."""


def usual_s(records: Sequence[IterationRecord]) -> float | None:
    """Return the usual seconds of an iteration, the median of the last ones; None before one is reported."""
    seconds = [
        (record.ended_at - record.started_at).total_seconds()
        for record in records[-_RECENT:]
        if record.started_at is not None and record.ended_at is not None
    ]
    return median(seconds) if seconds else None


def stall_limit_s(records: Sequence[IterationRecord], at_least_s: float | None) -> float:
    """Return the seconds of silence from which a run counts as stalled.

    Args:
        records: Records of its iterations, ascending.
        at_least_s: The least limit (`limits.stall_check_s`); it alone counts before an iteration is reported.
    """
    least = STALLED_AT_LEAST_S if at_least_s is None else at_least_s
    usual = usual_s(records)
    return least if usual is None else max(least, STALLED_FACTOR * usual)


def last_word(records: Sequence[IterationRecord]) -> datetime | None:
    """Return when the newest reported iteration ended, UTC; None before one is."""
    return next((record.ended_at for record in reversed(records) if record.ended_at is not None), None)


def who_waits_now(store: Store, run: str, head: int | None) -> str:
    """Return which side of a run that says nothing waits for the other, as the committed data has it: one clause.

    Args:
        store: Stores of all its regions as one (`storage.regional_view.view_of`).
        run: Run name.
        head: Newest committed policy version, which iteration `head` trains; None before there is one.

    Raises:
        StorageError: the rollouts' manifests can't be read.
    """
    if head is None:
        return "generation and training wait for the initial policy"
    if find_shards(store, run, Family.ROLLOUTS, Split.TRAIN, [head]):
        return f"generation waits for inference and training of iteration {head}, whose rollouts are all committed"
    return f"training waits for generation of iteration {head}, whose rollouts are not all committed"
