"""The timetable of a training run: iteration k is the DAG run whose logical date is `EPOCH + k * STEP`.

All dates lie in the past, so with catch-up the scheduler creates the next iteration whenever `max_active_runs` leaves
room, and goes on from the last one after a crash. Core-side code: loaded by the scheduler, the DAG processor, the API
server and the triggerer through the plugin entry point. It never raises for a state that the database may hold: an
exception here makes the DAG stop without a word (reference: Airflow 3.3.2, `next_dagrun_info` in the DAG processor).
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pendulum
from airflow.timetables.base import DagRunInfo, DataInterval, Timetable

from stages.home import EPOCH, STEP, logical_date_of

if TYPE_CHECKING:
    from airflow.timetables.base import TimeRestriction
    from airflow.utils.types import DagRunType


class IterationTimetable(Timetable):
    """One DAG run per RL iteration, in order, with an end."""

    description = "RL iterations, each as soon as the one before it leaves room"
    periodic = True
    run_ordering = ("logical_date",)

    def __init__(self, run: str, iterations: int) -> None:
        """Keep the run's name, which becomes part of run ids, and the number of its iterations."""
        self.run = run
        self.iterations = iterations

    @property
    def summary(self) -> str:
        """Text in the UI."""
        return f"{self.iterations} iterations"

    def serialize(self) -> dict[str, Any]:
        """Return the two facts as JSON."""
        return {"run": self.run, "iterations": self.iterations}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> IterationTimetable:
        """Return the timetable of serialised facts."""
        return cls(run=data["run"], iterations=data["iterations"])

    def infer_manual_data_interval(self, *, run_after: pendulum.DateTime) -> DataInterval:
        """Return the interval of the iteration at or before a date; the DAG allows no manual runs anyway."""
        return _interval(max(0, _iteration_at_or_before(run_after)))

    def next_dagrun_info(
        self,
        *,
        last_automated_data_interval: DataInterval | None,
        restriction: TimeRestriction,
    ) -> DagRunInfo | None:
        """Return the iteration after the last one, or None when that was the last of the run or of a backfill."""
        last = last_automated_data_interval
        iteration = 0 if last is None else max(0, _iteration_at_or_before(last.start) + 1)
        if restriction.earliest is not None:
            iteration = max(iteration, _iteration_at_or_after(restriction.earliest))
        if iteration >= self.iterations:
            return None
        interval = _interval(iteration)
        if restriction.latest is not None and interval.start > restriction.latest:
            return None  # the end of a backfill's range
        return DagRunInfo.interval(interval.start, interval.end)

    def generate_run_id(
        self,
        *,
        run_type: DagRunType,
        run_after: pendulum.DateTime,
        data_interval: DataInterval | None,
        **extra: Any,  # noqa: ANN401 - signature of the base class
    ) -> str:
        """Return a run id for people, e.g. `scheduled__demo.iter-000003`; nothing is ever read back from it."""
        if data_interval is None:
            return super().generate_run_id(run_type=run_type, run_after=run_after, data_interval=data_interval, **extra)
        return f"{run_type.value}__{self.run}.iter-{_iteration_at_or_before(data_interval.start):06d}"


def _iteration_at_or_before(date: datetime) -> int:
    return math.floor(_steps_since_epoch(date))


def _iteration_at_or_after(date: datetime) -> int:
    return math.ceil(_steps_since_epoch(date))


def _steps_since_epoch(date: datetime) -> float:
    # Through time stamps: differences of pendulum dates don't divide by a timedelta.
    return (date.timestamp() - EPOCH.timestamp()) / STEP.total_seconds()


def _interval(iteration: int) -> DataInterval:
    start = pendulum.instance(logical_date_of(iteration))
    return DataInterval(start=start, end=start + STEP)
