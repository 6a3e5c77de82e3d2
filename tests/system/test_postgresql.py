"""A deployment on PostgreSQL: a run whose database is cut off in the middle, and a password that is nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.deployment_api import AirflowApi
from stages.home import dag_id_of
from tests.system.deployed import Deployment, deployment, kill, needs_engines, outcome, trainings, until
from tests.system.postgres import PASSWORD, PostgresServer, postgres_server, server_programs

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(3600),
    needs_engines,
    pytest.mark.skipif(server_programs() is None, reason="needs the package postgresql"),
]

SPECS = Path(__file__).parent / "specs"
START = ("run", "--job", str(SPECS / "tiny_job.yaml"), "--cluster", str(SPECS / "tiny_cluster.yaml"), "--name", "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with postgres_server(tmp_path_factory.mktemp("server") / "postgres") as found:
        yield found


@pytest.fixture(scope="module")
def deployed(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("deployed"), database_url=server.url) as found:
        yield found


def dag_run_states(found: Deployment) -> set[str]:
    with AirflowApi(found.record.url) as api:
        return {run["state"] for run in api.dag_runs(dag_id_of("tiny"))}


def test_run_goes_on_after_its_database_was_cut_off_and_after_its_deployment_was_killed(
    deployed: Deployment, server: PostgresServer
) -> None:
    assert deployed.motley(*START, "--iterations", "4", "--detach").returncode == 0
    assert deployed.record.database_url == server.url
    assert not (deployed.home.airflow_dir / "airflow.db").exists()
    until(lambda: deployed.attempts("train", 1), "training of iteration 1")
    server.restart()
    until(lambda: deployed.attempts("train", 2) or "failed" in dag_run_states(deployed), "iteration 2 or a failure")
    assert kill(deployed.everything()) > 4
    finished = outcome(deployed.motley("resume", "tiny", "--json"))
    assert (finished["state"], finished["policy_version"]) == ("finished", 4)
    assert [trainings(deployed, k) for k in range(4)] == [1, 1, 1, 1]
    assert deployed.motley("verify", "tiny").returncode == 0


def test_operations_of_a_long_run_work_on_it(deployed: Deployment) -> None:
    rewound = deployed.motley("rewind", "tiny", "--to", "3", "--reason", "try again", "--json")
    assert rewound.returncode == 0, rewound.stderr
    assert outcome(deployed.motley("extend", "tiny", "--iterations", "5", "--json"))["iterations"] == 5
    assert outcome(deployed.motley("resume", "tiny", "--json"))["policy_version"] == 5
    assert dag_run_states(deployed) == {"success"}


def test_password_of_the_database_is_in_its_owners_record_alone(deployed: Deployment) -> None:
    """Airflow's own processes need it in their environment; command lines, stages, logs and records do not."""
    status = deployed.motley("status", "--json")
    assert status.returncode == 0
    assert PASSWORD not in status.stdout + status.stderr
    stages = {process.pid for process in [*deployed.stage_processes(), *deployed.engines()]}
    assert stages  # engines stay
    for process in deployed.everything():
        assert PASSWORD not in " ".join(process.cmdline()), process
        if process.pid in stages:
            assert PASSWORD not in repr(process.environ()), process
    holders = [
        file.relative_to(deployed.home.path)
        for file in deployed.home.path.rglob("*")
        if file.is_file() and PASSWORD.encode() in file.read_bytes()
    ]
    assert holders == [Path("deployment.json")]
    assert deployed.home.deployment_file.stat().st_mode & 0o077 == 0
