"""`motley worker`: the Edge worker of one machine of a cluster file, in the foreground, anywhere.

The worker dials out to the deployment over HTTP(S); nothing needs to reach it. On another computer it is told the
deployment's address and the secret that both share.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cli.deployment import HomeOption, home_of
from cli.deployment_api import AirflowApi
from cli.deployment_checks import airflow_python, check_home, engines_python
from cli.deployment_record import Worker, read_record
from cli.deployment_settings import named_settings, worker_environment
from cli.deployment_workers import (
    DEFAULT_CONCURRENCY,
    find_machine,
    prepare_home,
    wait_until_free,
    worker_command,
    worker_of,
)
from cli.documents import ClusterOption, read_cluster
from cli.errors import DeploymentError, InputError
from cli.output import Output
from stages.home import DEPLOYMENT_VARIABLE, ENGINES_PYTHON_VARIABLE, MotleyHome

app = typer.Typer()

SECRET_VARIABLE = "MOTLEY_JWT_SECRET"
"""Environment variable with the secret that deployment and workers share."""


@app.command()
def worker(
    machine: Annotated[str, typer.Option("--machine", help="Name of this machine in the cluster file.")],
    cluster: ClusterOption,
    concurrency: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = DEFAULT_CONCURRENCY,
    url: Annotated[
        str | None, typer.Option(help="Address of a deployment on another computer; needs MOTLEY_JWT_SECRET.")
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option("--root", help="Object-store root to look for runs in, beside those of the cluster file."),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Work for one machine of a cluster file until interrupted; Ctrl-C finishes what runs and takes nothing new."""
    output, place = Output(is_json=False), home_of(home)
    spec = read_cluster(cluster)
    wanted = worker_of(spec, find_machine(spec, machine), root or [], concurrency)
    if url is None:
        own, settings, python = _beside_deployment(wanted, place)
    else:
        own, settings, python = _far_from_deployment(wanted, place, url.rstrip("/"))
    pid_file = prepare_home(own)
    output.progress(f"worker {wanted.machine}: queue {wanted.queue}, region {wanted.region}, {wanted.gpu}")
    os.chdir(own.path)
    os.execve(python, worker_command(python, wanted, pid_file), settings)


def _beside_deployment(wanted: Worker, place: MotleyHome) -> tuple[MotleyHome, dict[str, str], str]:
    """Return home, environment and interpreter of a worker on the deployment's own computer."""
    record = read_record(place.deployment_file)
    if record is None or not record.processes:
        raise DeploymentError(
            f"No deployment runs in {place.path}; start one with `motley up --cluster FILE`, or give --url of one on "
            "another computer."
        )
    if not record.has_workers:
        raise DeploymentError(
            f"The deployment in {place.path} runs its tasks by itself (local executor) and takes no workers; start it "
            "anew with `motley down`, then `motley up --cluster FILE`."
        )
    with AirflowApi(record.url) as api:
        wait_until_free(api, wanted.machine)
    wanted = wanted.model_copy(update={"roots": (*wanted.roots, str(place.store_dir))})
    own = place.worker_home(wanted.machine)
    settings = worker_environment(wanted, own, os.environ, url=record.url, jwt_secret=record.jwt_secret)
    settings |= {ENGINES_PYTHON_VARIABLE: record.engines_python, DEPLOYMENT_VARIABLE: record.id}
    settings |= named_settings(place, os.environ)
    return own, settings, record.airflow_python


def _far_from_deployment(wanted: Worker, place: MotleyHome, url: str) -> tuple[MotleyHome, dict[str, str], str]:
    """Return home, environment and interpreter of a worker on a computer of its own."""
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret:
        raise InputError(
            f"A worker for {url} needs the deployment's secret in {SECRET_VARIABLE} (field jwt_secret of "
            "deployment.json in the deployment's home)."
        )
    if not wanted.roots:
        raise InputError(
            "The cluster file names no storage that this worker could read runs from; add `storage` to it, or give "
            "--root URL."
        )
    check_home(place)
    python, _ = airflow_python(os.environ)
    settings = worker_environment(wanted, place, os.environ, url=url, jwt_secret=secret)
    settings[ENGINES_PYTHON_VARIABLE] = engines_python(os.environ, None)
    return place, settings, python
