"""`motley pause`, `unpause`, `stop`, `retry`, `extend`: what a long run needs between its start and its end.

Each is also an action of Airflow's UI (docs/operations.md); a command adds the checks that only the committed data
allows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_api import AirflowApi
from cli.deployment_record import DeploymentRecord, read_record
from cli.deployment_start import is_up
from cli.errors import DeploymentError, InputError, RunFailedError
from cli.follow import RunFollower, run_iteration
from cli.follow_view import follow
from cli.output import Output
from cli.run_lookup import RUN_HELP, find_run, open_entry_store
from cli.run_register import register, wait_for_dag
from stages.home import MotleyHome, dag_id_of
from stages.launch import StageAttempt, all_attempts
from stages.run_entry import RunEntry
from stages.runs import ResolvedRun, create_run, demand_entry, load_run
from storage.policies import head_version

app = typer.Typer()

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]

ACTIVE = ("running", "queued")
"""States of DAG runs in which something can still happen."""

STOP_TIMEOUT_S = 90.0
"""Longest wait until the tasks of a stopped run have ended."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run of a deployment that is up."""

    home: MotleyHome
    """Local files of the deployment."""
    deployment: DeploymentRecord
    """The deployment."""
    api: AirflowApi
    """Its API."""
    entry: RunEntry
    """The run."""

    @property
    def dag_id(self) -> str:
        """DAG of the run."""
        return dag_id_of(self.entry.run)

    @property
    def resolved(self) -> ResolvedRun:
        """The run as its record says."""
        return load_run(self.entry.root, self.entry.run)

    def head(self) -> int | None:
        """Return the committed policy version."""
        return head_version(open_entry_store(self.entry), self.entry.run)

    def active_runs(self) -> list[dict[str, Any]]:
        """Return the DAG runs in which something can still happen."""
        return self.api.dag_runs(self.dag_id, states=ACTIVE)


@contextmanager
def live_run(argument: str, home: MotleyHome) -> Iterator[LiveRun]:
    """Give a run of this deployment, which must be up.

    Raises:
        InputError: no such run in the deployment.
        DeploymentError: the deployment is down.
    """
    entry = find_run(argument, home).entry
    if entry is None:
        raise InputError(f"{argument} names a run by its store; give the name of a run of the deployment {home.path}.")
    record = read_record(home.deployment_file)
    if record is None or not is_up(record):
        raise DeploymentError(
            f"The deployment in {home.path} is down, so run {entry.run} stands still; start it with `motley up`."
        )
    with AirflowApi(record.url) as api:
        yield LiveRun(home, record, api, entry)


@app.command()
def pause(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Let no further task of a run start; what runs now goes on to its end."""
    with live_run(run, home_of(home)) as live:
        live.api.set_paused(live.dag_id, is_paused=True)
        at_work = [run_iteration(item) for item in live.active_runs()]
        Output(is_json=json).result(
            {"run": live.entry.run, "state": "paused", "iterations_at_work": at_work},
            f"Run {live.entry.run} is paused; `motley unpause {live.entry.run}` lets it go on.",
        )


@app.command()
def unpause(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Let a paused run go on by itself; after a failure use `motley resume`."""
    with live_run(run, home_of(home)) as live:
        failed = [run_iteration(item) for item in live.api.dag_runs(live.dag_id, states=("failed",))]
        if failed:
            raise InputError(
                f"Run {live.entry.run} has failed iterations ({', '.join(map(str, failed))}), which unpausing would "
                f"leave behind; continue it with `motley resume {live.entry.run}`."
            )
        live.api.set_paused(live.dag_id, is_paused=False)
        Output(is_json=json).result(
            {"run": live.entry.run, "state": "running"}, f"Run {live.entry.run} goes on by itself."
        )


@app.command()
def stop(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Pause a run and end what runs of it now; committed data stays, `motley resume` goes on from there."""
    with live_run(run, home_of(home)) as live:
        stopped = stop_run(live)
        Output(is_json=json).result(
            {"run": live.entry.run, "state": "stopped", "iterations_ended": stopped},
            f"Run {live.entry.run} is stopped; `motley resume {live.entry.run}` goes on.",
        )


def stop_run(live: LiveRun) -> list[int]:
    """Pause a run, end its backfills, tasks and stage processes; return the iterations that were at work.

    Raises:
        DeploymentError: its tasks did not end.
    """
    live.api.set_paused(live.dag_id, is_paused=True)
    live.api.end_backfills(live.dag_id)
    stopped: set[int] = set()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while active := live.active_runs():
        for item in active:
            if run_iteration(item) not in stopped:
                live.api.fail_run(live.dag_id, item["dag_run_id"])
                stopped.add(run_iteration(item))
        if time.monotonic() > deadline:
            raise DeploymentError(
                f"Iteration(s) {sorted(map(run_iteration, active))} of run {live.entry.run} do not end; look at "
                "`motley status` and stop again."
            )
        time.sleep(0.5)
    for attempt in live_attempts(live.home, live.entry.run):
        attempt.end()
    return sorted(stopped)


def live_attempts(home: MotleyHome, run: str) -> list[StageAttempt]:
    """Return the stage processes of a run that are alive on this computer."""
    homes = [home, *(MotleyHome(path) for path in (home.path / "workers").glob("*"))]
    state_dirs = [path for place in homes for path in (place.path / "state").glob("*")]
    attempts = [attempt for state_dir in state_dirs for attempt in all_attempts(state_dir)]
    return [a for a in attempts if a.folder.parts[-5] == run and not a.result_file.exists() and a.is_alive()]


@app.command()
def retry(
    run: RunArgument,
    iteration: Annotated[int, typer.Option("--iteration", "-k", min=0, help="Iteration that failed.")],
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Run one failed iteration again, as a backfill of that iteration, and follow it to its end."""
    output = Output(is_json=json)
    with live_run(run, home_of(home)) as live:
        check_retry(live, iteration)
        live.api.end_backfills(live.dag_id)
        live.api.backfill_iteration(live.dag_id, iteration)
        live.api.set_paused(live.dag_id, is_paused=False)  # a paused DAG holds its backfills too
        follower = RunFollower(api=live.api, store=open_entry_store(live.entry), entry=live.entry)
        follow(follower, output, until_iteration=iteration)
        state = follower.final_state(iteration)
        if state == "failed":
            raise RunFailedError(follower.failure_text(iteration))
        output.result(
            {"run": live.entry.run, "iteration": iteration, "state": state},
            f"Iteration {iteration} of run {live.entry.run} is done; the run goes on by itself.",
        )


def check_retry(live: LiveRun, iteration: int) -> None:
    """Refuse to retry an iteration whose turn it is not.

    Raises:
        InputError: it is done, comes later, is outside the run, or runs now.
    """
    name, head = live.entry.run, live.head() or 0
    if iteration >= live.entry.iterations:
        raise InputError(
            f"Run {name} has iterations {live.entry.first_iteration} to {live.entry.iterations - 1}, so there is no "
            f"iteration {iteration}; `motley extend {name} --iterations N` makes more."
        )
    if iteration < head:
        raise InputError(
            f"Iteration {iteration} of run {name} is done (policy version {head} is committed); to make it anew, use "
            f"`motley rewind {name} --to {iteration}`."
        )
    if iteration > head:
        raise InputError(
            f"Iteration {iteration} of run {name} follows iteration {head}, which is not done; retry that one, or use "
            f"`motley resume {name}`."
        )
    if iteration in map(run_iteration, live.active_runs()):
        raise InputError(
            f"Iteration {iteration} of run {name} is at work; watch it with `motley resume {name}`, or end it first "
            f"with `motley stop {name}`."
        )


@app.command()
def extend(
    run: RunArgument,
    iterations: Annotated[int, typer.Option("--iterations", "-n", min=1, help="Iterations in all.")],
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Give a run more iterations; a finished one goes on by itself, a paused or failed one after `motley resume`."""
    place = home_of(home)
    found = find_run(run, place)
    if found.entry is None:
        raise InputError(f"{run} names a run by its store; give the name of a run of the deployment in {place.path}.")
    entry = extended(found.entry, iterations)
    register(entry, place)
    record = read_record(place.deployment_file)
    if record is not None and is_up(record):
        with AirflowApi(record.url) as api:
            wait_for_dag(api, entry)
    Output(is_json=json).result(
        {"run": entry.run, "iterations": entry.iterations},
        f"Run {entry.run} has {entry.iterations} iterations now; follow it with `motley resume {entry.run}`.",
    )


def extended(entry: RunEntry, iterations: int) -> RunEntry:
    """Return the entry with more iterations; brings the run record up to date.

    Raises:
        InputError: fewer iterations than the run has.
    """
    if iterations < entry.iterations:
        raise InputError(
            f"Run {entry.run} has {entry.iterations} iterations and can't be cut to {iterations}; give a larger "
            f"number, or end it early with `motley stop {entry.run}`."
        )
    before = load_run(entry.root, entry.run)
    return rewritten(before, job=before.job.model_copy(update={"iterations": iterations}))


def rewritten(run: ResolvedRun, **changes: Any) -> RunEntry:  # noqa: ANN401 - fields of ResolvedRun
    """Bring the record of a run up to date and return its entry.

    Raises:
        SpecFaultsError: names or numbers that Airflow's side can't take; nothing was written then.
    """
    resolved = changed(run, **changes)
    entry = demand_entry(resolved)
    create_run(resolved, is_resumed=True)
    return entry


def changed(run: ResolvedRun, **changes: Any) -> ResolvedRun:  # noqa: ANN401 - fields of ResolvedRun
    """Return a run with other fields."""
    return ResolvedRun(**{**{name: getattr(run, name) for name in ResolvedRun.__slots__}, **changes})
