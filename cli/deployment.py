"""`motley up`, `motley down`, `motley status`: the Airflow deployment of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.deployment_api import AirflowApi
from cli.deployment_processes import end_airflow, end_stages, marked_processes, running_components
from cli.deployment_record import COMPONENTS, DeploymentRecord, Worker, read_record, write_record
from cli.deployment_start import bring_up
from cli.deployment_workers import is_running
from cli.documents import read_cluster
from cli.errors import DeploymentError, InputError
from cli.output import Output
from stages.errors import ContractError
from stages.home import HOME_VARIABLE, MotleyHome
from stages.launch import STAGE_PART
from stages.run_entry import list_run_entries, read_run_entry

app = typer.Typer()

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Directory of the deployment; default: MOTLEY_HOME, else ~/.motley.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def home_of(option: Path | None) -> MotleyHome:
    """Return the home that a command works on.

    Raises:
        InputError: it starts from the home of a user that this computer does not know.
    """
    try:
        return MotleyHome.from_environment(os.environ) if option is None else MotleyHome(option.expanduser().absolute())
    except RuntimeError as error:
        named = os.environ.get(HOME_VARIABLE) if option is None else option
        raise InputError(
            f"The home directory {named or '~/.motley'} can't be found ({error}); give an absolute path with --home or "
            f"{HOME_VARIABLE}."
        ) from error


@app.command()
def up(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the UI; default: 8080 or a free one.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", "-c", help="Cluster file: every machine gets a worker on this computer."),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            help="Metadata database, e.g. postgresql+psycopg2://...; default: the one it has, at first "
            "MOTLEY_DATABASE_URL, else SQLite.",
        ),
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Start a real Airflow on this computer, loopback only; harmless when it is up already.

    Without --cluster tasks run beside the scheduler, which is right for one machine.
    """
    output = Output(is_json=json)
    record = bring_up(
        home_of(home),
        port=port,
        environment=os.environ,
        report=output.progress,
        cluster=None if cluster is None else read_cluster(cluster),
        database_url=database_url,
    )
    workers = [worker.machine for worker in record.workers]
    text = f"Airflow is up: {record.url}" + (f" (workers: {', '.join(workers)})" if workers else "")
    output.result({"url": record.url, "state": "up", "workers": workers}, text)


@app.command()
def down(home: HomeOption = None, json: JsonOption = False) -> None:
    """Stop Airflow, stage processes and engines of this deployment; harmless when nothing runs."""
    output = Output(is_json=json)
    place = home_of(home)
    record = read_record(place.deployment_file)
    if record is None:
        output.result({"state": "down", "ended": 0}, f"Nothing runs: {place.path} has no deployment.")
        return
    count = bring_down(place, record)
    output.result(
        {"state": "down", "ended": count}, f"Stopped ({count} process(es) ended)." if count else "Nothing was running."
    )


def bring_down(home: MotleyHome, record: DeploymentRecord) -> int:
    """End everything of a deployment and return how many processes that were.

    Raises:
        DeploymentError: a process can't be ended.
    """
    count = len({p.pid for p in marked_processes(record.id)} | {c.pid for c in running_components(record)})
    left = [*end_airflow(record, grace_s=5.0), *end_stages(record, grace_s=10.0)]
    if left:
        raise DeploymentError(
            f"processes {sorted({p.pid for p in left})} can't be ended; end them by hand, then run `motley down` again."
        )
    workers = tuple(worker.model_copy(update={"process": None}) for worker in record.workers)
    write_record(home.deployment_file, record.model_copy(update={"processes": (), "workers": workers}))
    return count


@app.command()
def status(home: HomeOption = None, json: JsonOption = False) -> None:
    """Show what runs."""
    output = Output(is_json=json)
    place = home_of(home)
    found = deployment_status(place)
    output.result(found, _status_text(found))


def deployment_status(home: MotleyHome) -> dict[str, Any]:
    """Return the state of the deployment as a JSON document."""
    record = read_record(home.deployment_file)
    runs, faults = [], []
    for file in list_run_entries(home.runs_dir):
        try:
            runs.append(read_run_entry(file).run)
        except ContractError as error:
            faults.append(str(error))
    found: dict[str, Any] = {
        "home": str(home.path),
        "state": "down",
        "url": None,
        "components": {},
        "runs": runs,
        "faults": faults,
    }
    if record is None:
        return found | {"stage_processes": 0}
    running = {component.name: component.pid for component in running_components(record)}
    with AirflowApi(record.url) as api:
        health = api.health() if running else {}
        reported = {w["worker_name"]: w for w in api.workers()} if running and record.has_workers else {}
    components = {
        name: {
            "pid": running.get(name),
            "health": health.get("metadatabase" if name == "api-server" else name.replace("-", "_")),
        }
        for name in COMPONENTS
    }
    workers = [_worker_status(worker, reported.pop(worker.machine, None)) for worker in record.workers]
    workers += [_far_worker_status(other) for other in reported.values()]
    is_healthy = all(part["pid"] and part["health"] == "healthy" for part in components.values())
    is_healthy = is_healthy and all(w["pid"] for w in workers if not w["is_elsewhere"])
    return found | {
        "state": "up" if is_healthy else "damaged" if running else "down",
        "url": record.url if running else None,
        "components": components,
        "workers": workers,
        "stage_processes": len(marked_processes(record.id, part=STAGE_PART)),
    }


def _worker_status(worker: Worker, reported: dict[str, Any] | None) -> dict[str, Any]:
    facts = worker.model_dump(mode="json", include={"machine", "queue", "region", "gpu", "count"})
    pid = worker.process.pid if worker.process is not None and is_running(worker) else None
    state = reported["state"] if reported else None
    return {**facts, "pid": pid, "state": state, "is_elsewhere": False}


def _far_worker_status(reported: dict[str, Any]) -> dict[str, Any]:
    info = reported.get("sysinfo") or {}
    return {
        "machine": reported["worker_name"],
        "queue": ",".join(reported.get("queues") or ()),
        "region": info.get("region"),
        "gpu": info.get("gpu"),
        "count": info.get("gpu_count"),
        "pid": None,
        "state": reported["state"],
        "is_elsewhere": True,
    }


def _status_text(found: dict[str, Any]) -> str:
    lines = [f"{found['state']}: {found['url'] or found['home']}"]
    for name, part in found["components"].items():
        lines.append(
            f"  {name:14} {('pid ' + str(part['pid'])) if part['pid'] else 'not running':14} {part['health'] or ''}"
        )
    for worker in found.get("workers", ()):
        place = f"pid {worker['pid']}" if worker["pid"] else "elsewhere" if worker["is_elsewhere"] else "not running"
        what = f"queue {worker['queue']}, {worker['region']}, {worker['count']} x {worker['gpu']}"
        lines.append(f"  worker {worker['machine']:7} {place:14} {worker['state'] or '':8} {what}")
    lines.append(f"  stage processes and engines: {found['stage_processes']}")
    lines.append(f"  runs: {', '.join(found['runs']) or 'none'}")
    lines += [f"  fault: {fault}" for fault in found["faults"]]
    if found["state"] == "damaged":
        lines.append("  Some parts are gone; run `motley up`.")
    return "\n".join(lines)
