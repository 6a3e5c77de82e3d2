"""Airflow over regions: its servers and a worker in the home region, a worker for every machine of the others.

The workers elsewhere are on another computer for all they know: `motley worker --url`, a home and a network of their
own, and the deployment's address at the near end of a line that ends at its loopback port.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from cli.deployment_processes import marked_processes
from cli.deployment_record import DeploymentRecord, read_record
from cli.deployment_settings import start_timeout_s
from cli.worker import SECRET_VARIABLE
from plans.spec.load import load_cluster
from scripts.regions.layout import REPOSITORY, Region, Regions, environment, free_ports, home_of
from scripts.regions.network import inside, line_options, proxy, recorded, spawn, stop, wait_for
from stages.home import DEPLOYMENT_VARIABLE, MotleyHome

WORKERS_S = 240.0
"""Longest wait for the workers of other regions, where the environment says nothing else."""

AIRFLOW_JOURNAL = "requests-to-airflow.jsonl"
"""Journal of what a region's workers ask Airflow, in the region's folder."""


def motley(layout: Regions, region: Region, *arguments: str) -> dict[str, Any]:
    """Run a `motley` command in a region and return the JSON document that it prints, also of one that says no.

    Its progress goes to this process's standard error.

    Raises:
        CalledProcessError: it failed and printed no document; standard error has the reason.
    """
    command = _command(region, *arguments, "--json")
    done = subprocess.run(command, env=_environment(layout, region), stdout=subprocess.PIPE, text=True, check=False)
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
    record = _record(layout)
    for region in layout.regions[1:]:
        layout, port = _line_to_airflow(layout, folder, region, record.ports.api)
        secrets = {SECRET_VARIABLE: record.jwt_secret, DEPLOYMENT_VARIABLE: record.id}
        for machine in (machine.name for machine in cluster.machines if machine.region == region.name):
            url = f"http://127.0.0.1:{port}"
            command = _command(region, "worker", "--machine", machine, "--cluster", str(cluster_file), "--url", url)
            worker = spawn(region, command, f"worker-{machine}", _environment(layout, region, secrets))
            layout = recorded(layout, folder, worker)
    _wait_for_workers(layout, [machine.name for machine in cluster.machines])
    return layout


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


def _line_to_airflow(layout: Regions, folder: Path, region: Region, port: int) -> tuple[Regions, int]:
    """Join a region to Airflow's loopback port at home; return the layout, and the port in the region."""
    way = layout.way(region.name, layout.home.name)
    target = f"127.0.0.1:{port}"
    if layout.mode == "namespaces":
        door, near = f"{way.peer_host}:{port}", port
        layout = recorded(layout, folder, proxy(layout.home, door, target, f"door-to-{region.name}"))
        target = door
    else:
        near = free_ports(1)[0]
    options = [*line_options(layout, way), "--journal", str(region.folder / AIRFLOW_JOURNAL)]
    line = proxy(region, f"127.0.0.1:{near}", target, "line-to-airflow", *options)
    layout = recorded(layout, folder, line)
    wait_for(region, near)
    return layout, near


def _wait_for_workers(layout: Regions, machines: Sequence[str]) -> None:
    timeout_s = start_timeout_s(WORKERS_S)
    deadline = time.monotonic() + timeout_s
    while True:
        found = motley(layout, layout.home, "status")["workers"]
        waiting = {*machines} - {worker["machine"] for worker in found if worker["state"] in ("idle", "running")}
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the workers of {', '.join(sorted(waiting))} did not report themselves within {timeout_s:.0f} s; see "
                f"their logs in {', '.join(str(region.folder) for region in layout.regions[1:])}"
            )
        time.sleep(2.0)


def _home_cluster(layout: Regions, folder: Path, cluster_file: Path) -> Path:
    """Write the cluster file's machines of the home region into a file of their own."""
    document = yaml.safe_load(cluster_file.read_text(encoding="utf-8"))
    name = layout.home.name
    document["machines"] = [machine for machine in document["machines"] if machine["region"] == name]
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


def _command(region: Region, *arguments: str) -> list[str]:
    return inside(region, [sys.executable, "-m", "cli", *arguments])


def _environment(layout: Regions, region: Region, more: Mapping[str, str] | None = None) -> dict[str, str]:
    engines = REPOSITORY / ".venv-engines" / "bin" / "python"
    found = {"MOTLEY_ENGINES_PYTHON": str(engines)} if engines.exists() else {}
    return {**found, **os.environ, **environment(layout, region), **(more or {})}
