"""Airflow's API server alone: database, DAGs and user interface of a home, and nothing that would run a task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from cli.deployment_ports import any_free
from cli.deployment_record import DeploymentRecord, Ports, Worker
from cli.deployment_settings import airflow_environment
from stages.home import MotleyHome

REPOSITORY = Path(__file__).parents[2]
USER, PASSWORD = "somebody", "for-this-test-only"

_SET_UP = """
from argparse import Namespace
from airflow.utils.db import initdb
initdb()
from airflow.cli.commands.dag_command import dag_reserialize
dag_reserialize(Namespace(bundle_name=None, verbose=False))
"""


@contextmanager
def api_server(home: Path, worker: Worker) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Start the API server of a home; give its address and the environment of its processes."""
    place = MotleyHome(home)
    api = any_free()
    logs = any_free([api])
    ports = Ports(api=api, worker_logs=logs, trigger_logs=any_free([api, logs]))
    record = DeploymentRecord(
        ports=ports, airflow_python=sys.executable, engines_python=sys.executable, workers=(worker,)
    )
    environment = {
        **airflow_environment(record, place, os.environ),
        "PYTHONPATH": str(REPOSITORY),
        "AIRFLOW__CORE__DAGS_FOLDER": str(REPOSITORY / "dags"),
        # A deployment on loopback signs everybody in; here somebody must be refused.
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(place.airflow_dir / "passwords.json"),
    }
    for folder in ("logs", "plugins"):
        (place.airflow_dir / folder).mkdir(parents=True)
    (place.airflow_dir / "passwords.json").write_text(json.dumps({USER: PASSWORD}))
    run_script(environment, _SET_UP)
    with (place.airflow_dir / "logs" / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "airflow", "api-server"], env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(record.url, server)
            yield record.url, environment
        finally:
            os.killpg(server.pid, 15)
            server.wait(600)


def sign_in(url: str) -> str:
    """Return a token of the server's only user."""
    answer = httpx.post(f"{url}/auth/token", json={"username": USER, "password": PASSWORD}, timeout=300.0)
    answer.raise_for_status()
    return str(answer.json()["access_token"])


def run_script(environment: Mapping[str, str], script: str) -> str:
    """Run Python in a process that sees the home's Airflow; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script], env=dict(environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + 1800.0
    while time.monotonic() < deadline:
        assert server.poll() is None, "the API server ended"
        try:
            if httpx.get(f"{url}/api/v2/version", timeout=10.0).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError("the API server did not answer")
