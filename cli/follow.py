"""Following a run: Airflow says what runs now, the committed data says what is done.

`RunFollower.poll` takes one look and returns what is new; how it is shown is `cli.follow_view`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from cli.deployment_api import AirflowApi
from cli.errors import DeploymentError, RunFailedError
from stages.home import dag_id_of, iteration_of
from stages.run_entry import RunEntry
from storage.errors import ObjectMissingError, TransientStorageError
from storage.policies import head_version
from storage.runs import IterationRecord, read_iteration
from storage.store import Store

POLL_INTERVAL_S = 1.0
"""Seconds between two looks."""

MOVING_STATES = frozenset({"running", "queued", "scheduled", "up_for_retry", "restarting", "up_for_reschedule"})
"""Task states from which something still happens by itself, whatever other iterations do."""

ENDED_STATES = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""Task states that are final for a try."""

SETTLE_S = 3.0
"""Seconds that a failure must stand: states of runs and tasks are fetched one after another."""

MAX_UNANSWERED = 20
"""Looks in a row without an answer of Airflow after which it counts as gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What one look saw."""

    iteration: int | None
    """Oldest iteration at work; None while none is."""
    stages: tuple[str, ...]
    """Rows at work in it, e.g. `generate.gpu-0`."""
    num_done: int
    """Iterations that Airflow has ended with success."""
    records: tuple[IterationRecord, ...]
    """Iteration records so far, by iteration."""
    events: tuple[str, ...]
    """One line for everything that is new since the look before."""
    is_finished: bool
    """Whether the last iteration is done."""
    eta_s: float | None
    """Estimated seconds to the end; None while nothing has been measured."""


@dataclass
class RunFollower:
    """Looks at one run again and again."""

    api: AirflowApi
    """The deployment."""
    store: Store
    """Store of the run's control region."""
    entry: RunEntry
    """The run."""
    records: dict[int, IterationRecord] = field(default_factory=dict)
    """Finished iterations' records seen so far."""
    _seen: dict[tuple[int, str], tuple[str, int]] = field(default_factory=dict)
    _active: dict[str, dict[str, Any]] = field(default_factory=dict)
    _unanswered: int = 0
    _failure_since: float | None = None

    @property
    def dag_id(self) -> str:
        """DAG of the run."""
        return dag_id_of(self.entry.run)

    def poll(self) -> Progress | None:
        """Take one look; None when Airflow did not answer this time.

        Raises:
            DeploymentError: Airflow has not answered for a while.
            RunFailedError: an iteration failed and nothing goes on.
        """
        try:
            active = self.api.dag_runs(self.dag_id, states=("running", "queued"))
            num_done = self.api.count_runs(self.dag_id, "success")
            ended = self._just_ended(active)
            tasks = {run["dag_run_id"]: self._tasks(run) for run in [*active, *ended]}
            failed = self.api.dag_runs(self.dag_id, states=("failed",))
        except DeploymentError as error:
            self._unanswered += 1
            if self._unanswered >= MAX_UNANSWERED:
                raise DeploymentError(
                    f"Airflow has stopped answering, so run {self.entry.run} stands still; continue it with "
                    f"`motley resume {self.entry.run}` ({error})"
                ) from error
            return None
        self._unanswered = 0
        self._active = {run["dag_run_id"]: run for run in active}
        events = [*self._task_events([*ended, *active], tasks), *self._new_records(num_done)]
        self._check_failed(active, tasks, failed)
        iteration, stages = _at_work(active, tasks)
        return Progress(
            iteration=iteration,
            stages=stages,
            num_done=num_done,
            records=tuple(self.records[k] for k in sorted(self.records)),
            events=tuple(events),
            is_finished=num_done >= self.entry.num_dag_runs and not active and self._is_trained(),
            eta_s=self._eta_s(num_done),
        )

    def final_state(self, iteration: int) -> str | None:
        """Return the final state of an iteration's DAG run, None while it has none."""
        for run in self.api.dag_runs(self.dag_id):
            if run_iteration(run) == iteration:
                return run["state"] if run["state"] in ("success", "failed") else None
        return None

    def _tasks(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        return self.api.task_instances(self.dag_id, run["dag_run_id"])

    def _just_ended(self, active: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the DAG runs that were active at the look before; their last tasks have not been told yet."""
        now = {run["dag_run_id"] for run in active}
        return [run for name, run in self._active.items() if name not in now]

    def _task_events(self, active: Sequence[dict[str, Any]], tasks: dict[str, list[dict[str, Any]]]) -> list[str]:
        events = []
        for run in active:
            k = run_iteration(run)
            for task in sorted(tasks[run["dag_run_id"]], key=lambda t: (str(t["start_date"] or "~"), t["task_id"])):
                now = (str(task["state"]), int(task["try_number"]))
                before = self._seen.get((k, task["task_id"]))
                self._seen[k, task["task_id"]] = now
                if now != before and now[0] in ("success", "failed", "up_for_retry"):
                    events.append(f"iteration {k}: {task['task_id']} {_phrase(task)}")
        return events

    def _new_records(self, num_done: int) -> list[str]:
        events = []
        first = self.entry.first_iteration
        k = first + len(self.records)
        while k < min(first + num_done + self.entry.lead + 1, self.entry.iterations):
            try:
                record = read_iteration(self.store, self.entry.run, k)
            except (ObjectMissingError, TransientStorageError):
                break
            self.records[k] = record
            events.append(record_line(record, self.entry.iterations))
            k += 1
        return events

    def _is_trained(self) -> bool:
        return (head_version(self.store, self.entry.run) or 0) >= self.entry.iterations

    def _check_failed(
        self,
        active: Sequence[dict[str, Any]],
        tasks: dict[str, list[dict[str, Any]]],
        failed: Sequence[dict[str, Any]],
    ) -> None:
        if not failed or any(_goes_on(run, tasks[run["dag_run_id"]]) for run in active):
            self._failure_since = None
            return
        self._failure_since = self._failure_since or time.monotonic()
        if time.monotonic() - self._failure_since > SETTLE_S:
            raise RunFailedError(self.failure_text(min(map(run_iteration, failed))))

    def failure_text(self, iteration: int) -> str:
        """Return the sentence about a failed iteration, with the errors of its tasks."""
        k = iteration
        run = next(r for r in self.api.dag_runs(self.dag_id) if run_iteration(r) == k)
        failed = [t for t in self.api.task_instances(self.dag_id, run["dag_run_id"]) if t["state"] == "failed"]
        names = ", ".join(sorted(t["task_id"] for t in failed)) or "a task"
        reason = "".join(
            f"\n{line}" for t in failed for line in self.api.last_error_lines(self.dag_id, run["dag_run_id"], t)
        )
        return (
            f"Run {self.entry.run} stopped: iteration {k} failed in {names}; after the cause is removed, continue with "
            f"`motley resume {self.entry.run}`.{reason}"
        )

    def _eta_s(self, num_done: int) -> float | None:
        timed = [record for record in list(self.records.values())[-6:] if record.started_at and record.ended_at]
        # Iterations may overlap: what counts is how long one ends after the other.
        ends = [record.ended_at for record in timed if record.ended_at]
        spans = [(after - before).total_seconds() for before, after in pairwise(ends)]
        if not spans and timed and timed[0].started_at and timed[0].ended_at:
            spans = [(timed[0].ended_at - timed[0].started_at).total_seconds()]
        return max(0.0, sum(spans) / len(spans)) * (self.entry.num_dag_runs - num_done) if spans else None


def run_iteration(run: dict[str, Any]) -> int:
    """Return the iteration of a DAG run as the REST API gives it."""
    return iteration_of(datetime.fromisoformat(str(run["logical_date"]).replace("Z", "+00:00")))


def record_line(record: IterationRecord, iterations: int) -> str:
    """Return one line about a finished iteration."""
    metrics = record.metrics
    parts = [f"iteration {record.iteration} done ({record.iteration + 1}/{iterations})"]
    for label, name, form in (
        ("reward", "reward_mean", ".3f"),
        ("eval", "eval_reward_mean", ".3f"),
        ("tokens/s", "tokens_per_s", ".0f"),
    ):
        if (value := metrics.get(name)) is not None:
            parts.append(f"{label} {value:{form}}")
    if record.started_at and record.ended_at:
        parts.append(f"{(record.ended_at - record.started_at).total_seconds():.1f} s")
    return "  ".join([*parts, *(f"ALARM {alarm}" for alarm in getattr(record, "alarms", ()))])


def _goes_on(run: dict[str, Any], tasks: Sequence[dict[str, Any]]) -> bool:
    """Whether an active DAG run does something by itself; one that is held at a gate waits for another iteration."""
    states = {task["state"] for task in tasks}
    return run["state"] == "queued" or bool(states & MOVING_STATES) or "deferred" not in states


def _at_work(
    active: Sequence[dict[str, Any]], tasks: dict[str, list[dict[str, Any]]]
) -> tuple[int | None, tuple[str, ...]]:
    for run in sorted(active, key=run_iteration):
        names = [t["task_id"] for t in tasks[run["dag_run_id"]] if t["state"] in MOVING_STATES | {"deferred"}]
        if names:
            return run_iteration(run), tuple(sorted(names))
    return (run_iteration(active[0]), ()) if active else (None, ())


def _phrase(task: dict[str, Any]) -> str:
    seconds = f" {task['duration']:.1f} s" if task.get("duration") is not None else ""
    words = {"success": f"done{seconds}", "failed": f"FAILED{seconds}", "up_for_retry": "failed and is tried again"}
    return words[task["state"]]
