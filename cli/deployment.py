"""`motley up`, `motley down`, `motley status`: the Airflow deployment of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.deployment_api import AirflowApi
from cli.deployment_processes import end_airflow, end_stages, marked_processes, running_components
from cli.deployment_record import COMPONENTS, DeploymentRecord, read_record, write_record
from cli.deployment_start import bring_up
from cli.errors import DeploymentError
from cli.output import Output
from stages.errors import ContractError
from stages.home import MotleyHome
from stages.launch import STAGE_PART
from stages.run_entry import list_run_entries, read_run_entry

app = typer.Typer()

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Directory of the deployment; default: MOTLEY_HOME, else ~/.motley.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def home_of(option: Path | None) -> MotleyHome:
    """Return the home that a command works on."""
    return MotleyHome.from_environment(os.environ) if option is None else MotleyHome(option.expanduser().absolute())


@app.command()
def up(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the UI; default: 8080 or a free one.")
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Start a real Airflow on this machine (SQLite, local executor, loopback only); harmless when it is up already."""
    output = Output(is_json=json)
    record = bring_up(home_of(home), port=port, environment=os.environ, report=output.progress)
    output.result({"url": record.url, "state": "up"}, f"Airflow is up: {record.url}")


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
    write_record(home.deployment_file, record.model_copy(update={"processes": ()}))
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
    components = {
        name: {
            "pid": running.get(name),
            "health": health.get("metadatabase" if name == "api-server" else name.replace("-", "_")),
        }
        for name in COMPONENTS
    }
    is_healthy = all(part["pid"] and part["health"] == "healthy" for part in components.values())
    return found | {
        "state": "up" if is_healthy else "damaged" if running else "down",
        "url": record.url if running else None,
        "components": components,
        "stage_processes": len(marked_processes(record.id, part=STAGE_PART)),
    }


def _status_text(found: dict[str, Any]) -> str:
    lines = [f"{found['state']}: {found['url'] or found['home']}"]
    for name, part in found["components"].items():
        lines.append(
            f"  {name:14} {('pid ' + str(part['pid'])) if part['pid'] else 'not running':14} {part['health'] or ''}"
        )
    lines.append(f"  stage processes and engines: {found['stage_processes']}")
    lines.append(f"  runs: {', '.join(found['runs']) or 'none'}")
    lines += [f"  fault: {fault}" for fault in found["faults"]]
    if found["state"] == "damaged":
        lines.append("  Some parts are gone; run `motley up`.")
    return "\n".join(lines)
