"""`motley resume RUN`: continue a run after any interruption. Idempotent.

The committed data says how far the run is; Airflow's states only say which DAG runs must be run again. A failed
iteration is retried as a backfill of one iteration, which has a slot of its own: clearing it can deadlock with
`max_active_runs`.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_api import AirflowApi
from cli.deployment_start import bring_up
from cli.errors import RunFailedError
from cli.follow import RunFollower, run_iteration
from cli.follow_view import follow
from cli.output import Output
from cli.run_lookup import RUN_HELP, find_run, open_entry_store
from cli.run_outcome import outcome_of, outcome_text
from cli.run_register import check_served, entry_from_store, register, wait_for_dag
from stages.home import dag_id_of
from stages.run_entry import RunEntry
from storage.policies import head_version
from storage.store import Store

app = typer.Typer()


@app.command()
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)],
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the UI, if Airflow must be started.")
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Continue a run after any interruption (a failure, a crash, `motley down`, a pause) and follow it to its end."""
    output, place = Output(is_json=json), home_of(home)
    found = find_run(run, place)
    entry = found.entry or entry_from_store(found.store.url, found.name)
    deployment = bring_up(place, port=port, environment=os.environ, report=output.progress)
    check_served(deployment, entry)
    register(entry, place)
    store = open_entry_store(entry)
    with AirflowApi(deployment.url) as api:
        wait_for_dag(api, entry)
        follower = RunFollower(api=api, store=store, entry=entry)
        clear_the_way(follower, output)
        api.set_paused(follower.dag_id, is_paused=False)
        follow(follower, output)
    outcome = outcome_of(entry, store, deployment.url)
    output.result(outcome, outcome_text(outcome))


def clear_the_way(follower: RunFollower, output: Output) -> None:
    """Run every iteration again, in order, that Airflow has as failed, or as successful without its policy version.

    Raises:
        RunFailedError: one of them failed again.
    """
    api, dag_id = follower.api, follower.dag_id
    done: set[int] = set()
    while (redo := first_to_redo(api, follower.store, follower.entry)) is not None:
        iteration, is_success_redone = redo
        if iteration in done:
            raise RunFailedError(
                f"Run {follower.entry.run}: iteration {iteration} ran again without committing policy version "
                f"{iteration + 1}; look "
                "at its tasks in the UI."
            )
        done.add(iteration)
        api.end_backfills(dag_id)
        output.progress(f"iteration {iteration} is run again")
        api.backfill_iteration(dag_id, iteration, is_success_redone=is_success_redone)
        api.set_paused(dag_id, is_paused=False)  # a paused DAG holds its backfills too
        follow(follower, output, until_iteration=iteration)
        if follower.final_state(iteration) == "failed":
            raise RunFailedError(follower.failure_text(iteration))


def first_to_redo(api: AirflowApi, store: Store, entry: RunEntry) -> tuple[int, bool] | None:
    """Return the first iteration whose DAG run must be run again and whether it stands as successful.

    None when there is no such iteration.
    """
    head = head_version(store, entry.run)
    for run in api.dag_runs(dag_id_of(entry.run), states=("success", "failed")):
        iteration = run_iteration(run)
        if run["state"] == "failed":
            return iteration, False
        if head is None or iteration >= head:  # marked successful by hand: the data knows better
            return iteration, True
    return None
