"""What a person expects of a deployment: up and down are idempotent, failures are sentences, nothing stays behind."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.deployment_api import AirflowApi
from stages.home import ENGINES_PYTHON_VARIABLE, dag_id_of
from stages.launch import all_attempts
from tests.system.deployed import Deployment, deployment, needs_engines, outcome

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1800),
    needs_engines,
]

SPECS = Path(__file__).parent / "specs"


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an engines' interpreter that does not work while a file `broken` lies beside it."""
    folder = tmp_path_factory.mktemp("interpreter")
    real = os.environ[ENGINES_PYTHON_VARIABLE]
    (folder / "python").write_text(f'#!/bin/sh\n[ -e "{folder}/broken" ] && kill -9 $$\nexec "{real}" "$@"\n')
    (folder / "python").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, switch: Path) -> Iterator[Deployment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENGINES_PYTHON_VARIABLE, str(switch / "python"))
        with deployment(tmp_path_factory.mktemp("deployed")) as found:
            yield found


def versions_of(found: Deployment, run: str) -> int:
    with AirflowApi(found.record.url) as api:
        return api.num_versions(dag_id_of(run))


def test_up_is_idempotent_and_status_shows_every_part(deployed: Deployment) -> None:
    first = outcome(deployed.motley("up", "--json"))
    pids = [component.pid for component in deployed.record.processes]
    assert outcome(deployed.motley("up", "--json")) == first
    assert [component.pid for component in deployed.record.processes] == pids
    status = outcome(deployed.motley("status", "--json"))
    assert (status["state"], status["url"]) == ("up", first["url"])
    assert {name: part["health"] for name, part in status["components"].items()} == {
        "api-server": "healthy",
        "scheduler": "healthy",
        "dag-processor": "healthy",
        "triggerer": "healthy",
    }


def test_up_on_a_port_in_use_says_who_holds_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server, deployment(tmp_path / "home") as found:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        done = found.motley("up", "--port", str(port))
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"port {port} on 127.0.0.1 is in use by ")
        assert f"pid {os.getpid()}" in done.stderr


def test_iteration_failed_and_cause_removed_is_resumed_by_a_backfill(deployed: Deployment, switch: Path) -> None:
    """Stage processes die at once; after the last retry the run stops with a sentence, and resume finishes it."""
    deployed.motley("up")
    (switch / "broken").touch()
    start = ("--job", str(SPECS / "tiny_job.yaml"), "--cluster", str(SPECS / "tiny_cluster.yaml"))
    refused = deployed.motley("run", *start, "--name", "tiny", "--iterations", "2")
    assert refused.returncode == 1  # the preflight runs in the same interpreter
    (switch / "broken").unlink()
    assert deployed.motley("run", *start, "--name", "tiny", "--iterations", "2", "--detach").returncode == 0
    (switch / "broken").touch()
    stopped = deployed.motley("resume", "tiny")
    assert stopped.returncode == 1
    assert "Run tiny stopped: iteration 0 failed in " in stopped.stderr
    assert "was killed by SIGKILL and left no result" in stopped.stderr
    (switch / "broken").unlink()
    finished = outcome(deployed.motley("resume", "tiny", "--json"))
    assert (finished["state"], finished["policy_version"]) == ("finished", 2)
    with AirflowApi(deployed.record.url) as api:
        runs = api.dag_runs(dag_id_of("tiny"))
    assert [(run["state"], run["run_type"]) for run in runs] == [("success", "backfill"), ("success", "scheduled")]


def test_run_is_extended_and_its_dag_has_one_version_per_length(deployed: Deployment) -> None:
    assert versions_of(deployed, "tiny") == 1
    assert outcome(deployed.motley("extend", "tiny", "--iterations", "3", "--json"))["iterations"] == 3
    extended = outcome(deployed.motley("resume", "tiny", "--json"))
    assert (extended["state"], extended["policy_version"]) == ("finished", 3)
    assert versions_of(deployed, "tiny") == 2


def test_resume_of_a_finished_run_does_nothing(deployed: Deployment) -> None:
    before = [a.folder for a in all_attempts(deployed.home.state_dir("local"))]
    assert outcome(deployed.motley("resume", "tiny", "--json"))["state"] == "finished"
    assert [a.folder for a in all_attempts(deployed.home.state_dir("local"))] == before


def test_down_leaves_nothing_and_is_idempotent(deployed: Deployment) -> None:
    assert outcome(deployed.motley("down", "--json"))["ended"] > 4
    assert deployed.everything() == []
    assert json.loads(deployed.motley("down", "--json").stdout) == {"state": "down", "ended": 0}
