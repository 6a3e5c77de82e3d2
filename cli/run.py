"""`motley run`: train, as iterations of a DAG of its own in the Airflow of this machine."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_api import AirflowApi
from cli.deployment_checks import check_home, engines_python
from cli.deployment_record import read_record
from cli.deployment_start import bring_up
from cli.documents import ClusterOption, JobOption, read_text
from cli.errors import InputError
from cli.follow import RunFollower
from cli.follow_view import follow
from cli.output import Output
from cli.plan_by_hand import commit_plan, plan_by_hand
from cli.run_lookup import open_entry_store
from cli.run_outcome import outcome_of, outcome_text
from cli.run_register import check_served, default_name, preflight, register, wait_for_dag
from stages.home import dag_id_of
from stages.prompts import prompt_cache
from stages.runs import ResolvedRun, create_run, demand_free_name, entry_of, resolve_run

app = typer.Typer()


@app.command()
def run(
    job: JobOption,
    cluster: ClusterOption,
    iterations: Annotated[int | None, typer.Option("--iterations", "-n", help="Default: the job's.")] = None,
    name: Annotated[str | None, typer.Option(help="Run name; default: the job's name and the time.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: the job's.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", "-p", help="Plan file (JSON) to start with; default: the planner decides."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the UI, if Airflow must be started.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Don't follow; the run goes on by itself.")] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Run iterations of a job through Airflow (started if it is down), follow them, print the outcome."""
    output, place = Output(is_json=json), home_of(home)
    now = datetime.now().astimezone()
    resolved = resolve_run(
        read_text(job),
        read_text(cluster),
        default_name(job.stem, now) if name is None else name,
        iterations,
        seed,
        str(place.store_dir),
        job_source=str(job),
        cluster_source=str(cluster),
        job_folder=job.absolute().parent,
        cluster_folder=cluster.absolute().parent,
    )
    if name is None:
        resolved = _renamed(resolved, default_name(resolved.job.name, now))
    entry = entry_of(resolved)
    if place.run_entry_file(entry.run).exists():
        raise InputError(
            f"There is a run {entry.run!r} in {place.path} already; give another --name, or continue it with "
            f"`motley resume {entry.run}`."
        )
    chosen = None if plan is None else plan_by_hand(plan, resolved)
    check_home(place)
    output.progress("checking model, data and rewards")
    record = read_record(place.deployment_file)
    python = engines_python(os.environ, record.engines_python if record else None)
    cache = prompt_cache(place.state_dir(entry.machines[0].name), entry.run)
    preflight(python, job, cluster, cache, output.progress, root=place.store_dir)
    demand_free_name(resolved)
    deployment = bring_up(place, port=port, environment=os.environ, report=output.progress)
    check_served(deployment, entry, cluster)
    create_run(resolved)
    if chosen is not None:
        commit_plan(resolved, chosen, 0, "motley run --plan")
    register(entry, place)
    output.progress(f"run {entry.run}: {entry.iterations} iterations, {deployment.url}/dags/{dag_id_of(entry.run)}")
    store = open_entry_store(entry)
    with AirflowApi(deployment.url) as api:
        wait_for_dag(api, entry)
        if not detach:
            follow(RunFollower(api=api, store=store, entry=entry), output)
    outcome = outcome_of(entry, store, deployment.url)
    text = (
        f"Run {entry.run} goes on by itself; watch it with `motley resume {entry.run}`."
        if detach
        else outcome_text(outcome)
    )
    output.result(outcome, text)


def _renamed(resolved: ResolvedRun, name: str) -> ResolvedRun:
    return ResolvedRun(name=name, job=resolved.job, cluster=resolved.cluster, roots=resolved.roots)
