"""Airflow over regions: its servers and a worker in the home region's network, a worker in every other network.

The workers elsewhere are on another computer for all they know: `motley worker --url`, a home and a network of their
own, and the deployment's address at the near end of a line that ends at its loopback port.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from cli.deployment_processes import marked_processes
from cli.deployment_record import DeploymentRecord, read_record
from cli.deployment_settings import start_timeout_s
from cli.deployment_workers import GONE_STATES
from cli.worker import SECRET_VARIABLE
from plans.spec.load import load_cluster
from scripts.regions.layout import REPOSITORY, Place, Regions, Site, Way, environment, free_ports, home_of
from scripts.regions.network import inside, line_options, proxy, recorded, spawn, stop, wait_for
from stages.home import DEPLOYMENT_VARIABLE, ENGINES_PYTHON_VARIABLE, HOME_VARIABLE, MotleyHome

WORKERS_S = 240.0
"""Longest wait for the workers of other regions, where the environment says nothing else."""

AIRFLOW_JOURNAL = "requests-to-airflow.jsonl"
"""Journal of what a worker asks Airflow, in the folder of its region or site."""


def motley(layout: Regions, place: Place, *arguments: str) -> dict[str, Any]:
    """Run a `motley` command in a network and return the JSON document that it prints, also of one that says no.

    Its progress goes to this process's standard error.

    Raises:
        CalledProcessError: it failed and printed no document; standard error has the reason.
    """
    command = _command(place, *arguments, "--json")
    done = subprocess.run(command, env=_environment(layout, place), stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise subprocess.CalledProcessError(done.returncode, command)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def bring_up(layout: Regions, folder: Path, cluster_file: Path) -> Regions:
    """Start Airflow at home and all workers; return the layout with the processes.

    Raises:
        CalledProcessError: Airflow did not come up.
        TimeoutError: a worker did not report itself; names the folder with its log.
    """
    cluster = load_cluster(cluster_file.read_text(encoding="utf-8"), str(cluster_file))
    motley(layout, layout.home, "up", "--cluster", str(_home_cluster(layout, folder, cluster_file)))
    layout = _lines_to_airflow(layout, folder, _record(layout).ports.api)
    for place in layout.places[1:]:
        layout = start_worker(layout, folder, cluster_file, place)
    wait_for_workers(layout, [machine.name for machine in cluster.machines])
    return layout


def start_worker(layout: Regions, folder: Path, cluster_file: Path, place: Place) -> Regions:
    """Start the worker of a region's or site's machine, any but home's first; return the layout with its process.

    Airflow takes a worker only after it has missed the one before of the same name, so this waits for that.

    Raises:
        TimeoutError: the one before lives on.
    """
    record = _record(layout)
    secrets = {SECRET_VARIABLE: record.jwt_secret, DEPLOYMENT_VARIABLE: record.id}
    machine = machine_at(cluster_file, place)
    _wait_until(lambda: machine not in _living_workers(layout), f"Airflow did not miss the worker of {machine}")
    url = f"http://127.0.0.1:{layout.airflow_ports[place.name]}"
    command = _command(place, "worker", "--machine", machine, "--cluster", str(cluster_file), "--url", url)
    worker = spawn(place, command, f"worker-{machine}", _environment(layout, place, secrets))
    return recorded(layout, folder, worker)


def machine_at(cluster_file: Path, place: Place) -> str:
    """Return the machine in a network: a site's own, a region's first one."""
    if isinstance(place, Site):
        return place.name
    cluster = load_cluster(cluster_file.read_text(encoding="utf-8"), str(cluster_file))
    return next(machine.name for machine in cluster.machines if machine.region == place.name)


def processes_at(layout: Regions, place: Place) -> list[psutil.Process]:
    """Return what a loss of power would end there: worker, task and stage processes and engines, not the line."""
    home = str(home_of(place))
    return [process for process in left_over(layout) if home_of_process(process) == home]


def bring_down(layout: Regions, folder: Path) -> None:
    """End Airflow, the workers and what they started, then the regions; nothing is left whatever had come up."""
    try:
        if read_record(MotleyHome(home_of(layout.home)).deployment_file) is not None:
            motley(layout, layout.home, "down")
    finally:
        stop(layout, folder)


def left_over(layout: Regions) -> list[psutil.Process]:
    """Return the processes of the deployment that live, in whatever region."""
    return marked_processes(_record(layout).id)


def _lines_to_airflow(layout: Regions, folder: Path, port: int) -> Regions:
    """Join all other networks to Airflow's loopback port at home, whose addresses in them get doors to it."""
    ways = [way for way in layout.ways if way.peer == layout.home.name]
    if layout.mode == "namespaces":
        for host in dict.fromkeys(way.peer_host for way in ways):
            door = proxy(layout.home, f"{host}:{port}", f"127.0.0.1:{port}", f"door-at-{host}")
            layout = recorded(layout, folder, door)
    # Without namespaces a site of home is in Airflow's own network.
    ports = {site.name: port for site in layout.sites if site.region == layout.home.name}
    for way in ways:
        layout, ports[way.asker] = _line_to_airflow(layout, folder, way, port)
    layout = layout.model_copy(update={"airflow_ports": ports})
    layout.save(folder)
    return layout


def engines_python() -> str:
    """Return the interpreter of the engines: the environment's, or that of `make env`."""
    return os.environ.get(ENGINES_PYTHON_VARIABLE) or str(REPOSITORY / ".venv-engines" / "bin" / "python")


def _line_to_airflow(layout: Regions, folder: Path, way: Way, port: int) -> tuple[Regions, int]:
    place = layout.place(way.asker)
    near = port if layout.mode == "namespaces" else free_ports(1)[0]
    options = [*line_options(layout, way), "--journal", str(place.folder / AIRFLOW_JOURNAL)]
    line = proxy(place, f"127.0.0.1:{near}", f"{way.peer_host}:{port}", "line-to-airflow", *options)
    layout = recorded(layout, folder, line)
    wait_for(place, near)
    return layout, near


def wait_for_workers(layout: Regions, machines: Sequence[str]) -> None:
    """Wait until the workers of machines have reported themselves.

    Raises:
        TimeoutError: one did not; names the folders with the logs.
    """
    folders = ", ".join(str(place.folder) for place in layout.places[1:])
    _wait_until(
        lambda: {*machines} <= _living_workers(layout),
        f"not all workers of {', '.join(machines)} reported themselves; see their logs in {folders}",
    )


def _living_workers(layout: Regions) -> set[str]:
    """Return the machines whose workers Airflow takes for alive."""
    found = motley(layout, layout.home, "status")["workers"]
    return {worker["machine"] for worker in found if worker["state"] not in GONE_STATES}


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    timeout_s = start_timeout_s(WORKERS_S)
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} (waited {timeout_s:.0f} s)")
        time.sleep(2.0)


def _home_cluster(layout: Regions, folder: Path, cluster_file: Path) -> Path:
    """Write the machine in the home region's network into a cluster file of its own."""
    document = yaml.safe_load(cluster_file.read_text(encoding="utf-8"))
    name, machine = layout.home.name, machine_at(cluster_file, layout.home)
    document["machines"] = [each for each in document["machines"] if each["name"] == machine]
    document["storage"] = {name: document["storage"][name]}
    document["links"].pop("regions", None)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return file


def _record(layout: Regions) -> DeploymentRecord:
    record = read_record(MotleyHome(home_of(layout.home)).deployment_file)
    if record is None:
        raise FileNotFoundError(f"{home_of(layout.home)} has no deployment; `motley up` did not get far enough")
    return record


def home_of_process(process: psutil.Process) -> str | None:
    """Return MOTLEY_HOME of a process, None if it has none or is gone."""
    try:
        return process.environ().get(HOME_VARIABLE)
    except (psutil.Error, OSError):
        return None


def _command(place: Place, *arguments: str) -> list[str]:
    return inside(place, [sys.executable, "-m", "cli", *arguments])


def _environment(layout: Regions, place: Place, more: Mapping[str, str] | None = None) -> dict[str, str]:
    engines = {ENGINES_PYTHON_VARIABLE: engines_python()}
    return {**os.environ, **engines, **environment(layout, place), **(more or {})}
