"""Workers of a cluster file: who they are, which names are free, what their processes are told."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli import deployment_workers
from cli.deployment_api import AirflowApi
from cli.deployment_record import DeploymentRecord, Ports
from cli.deployment_settings import DATABASE_VARIABLE, EDGE_EXECUTOR, airflow_environment, worker_environment
from cli.deployment_start import with_workers
from cli.deployment_workers import find_machine, missing_queues, wait_until_free, worker_command, workers_of
from cli.doctor_checks import Verdict, check_cluster
from cli.errors import DeploymentError, InputError
from plans.spec.load import load_cluster
from plugins.worker_info import worker_facts
from stages.home import WORKER_VARIABLE, MotleyHome

CLUSTER = load_cluster((Path(__file__).parents[2] / "system" / "specs" / "two_machines.yaml").read_text(), "cluster")
RECORD = DeploymentRecord(
    ports=Ports(api=18080, worker_logs=2, trigger_logs=3), airflow_python="python", engines_python="engines"
)


def reported(name: str, state: str = "idle", age_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    machine = next((m for m in CLUSTER.machines if m.name == name), CLUSTER.machines[0])
    return {
        "worker_name": name, "state": state, "queues": [machine.queue_name],
        "last_heartbeat": (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat(),
        "sysinfo": {"region": machine.region, "gpu": machine.gpu, "gpu_count": machine.count}, **changes,
    }  # fmt: skip


def api_of(*answers: list[dict[str, Any]]) -> AirflowApi:
    """An API whose workers are those of each answer in turn, then of the last one."""
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            return httpx.Response(201, json={"access_token": "t"})
        workers = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(200, json={"workers": workers, "total_entries": len(workers)})

    return AirflowApi("http://127.0.0.1:1", transport=httpx.MockTransport(answer))


def test_every_machine_gets_a_worker_with_its_queue_and_facts(tmp_path: Path) -> None:
    trainer, sampler = workers_of(CLUSTER, MotleyHome(tmp_path))
    assert (trainer.machine, trainer.queue, sampler.queue, sampler.region) == (
        "trainer", "q-trainer", "q-sampler", "here",
    )  # fmt: skip
    assert sampler.roots == (str(tmp_path / "store"),)
    command = worker_command("python", sampler, Path("pid"))
    assert command[:5] == ["python", "-m", "airflow", "edge", "worker"]
    assert command[command.index("--queues") + 1] == "q-sampler"


def test_worker_has_no_database_and_a_home_and_logs_of_its_own(tmp_path: Path) -> None:
    worker = workers_of(CLUSTER, MotleyHome(tmp_path))[1]
    own = MotleyHome(tmp_path).worker_home("sampler")
    caller = {"PATH": "/bin", "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://secret"}
    found = worker_environment(worker, own, caller, url="https://hub", jwt_secret="s")
    assert "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN" not in found
    assert found["AIRFLOW_HOME"] == str(tmp_path / "workers" / "sampler" / "airflow")
    assert found["AIRFLOW__LOGGING__BASE_LOG_FOLDER"].startswith(found["AIRFLOW_HOME"])
    assert found["AIRFLOW__EDGE__API_URL"] == "https://hub/edge_worker/v1/rpcapi"
    assert found["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] == "https://hub/execution/"
    assert worker_facts(found[WORKER_VARIABLE]) == {
        "machine": "sampler", "region": "here", "gpu": "cpu", "gpu_count": 1, "roots": str(tmp_path / "store"),
    }  # fmt: skip


def test_worker_and_scheduler_have_the_same_executor_and_one_machine_needs_none(tmp_path: Path) -> None:
    home = MotleyHome(tmp_path)
    with_pool = with_workers(RECORD, home, CLUSTER, None)
    worker = worker_environment(with_pool.workers[0], home, {}, url=RECORD.url, jwt_secret="s")
    assert airflow_environment(with_pool, home, {})["AIRFLOW__CORE__EXECUTOR"] == EDGE_EXECUTOR
    assert worker["AIRFLOW__CORE__EXECUTOR"] == EDGE_EXECUTOR
    assert airflow_environment(RECORD, home, {})["AIRFLOW__CORE__EXECUTOR"] == "LocalExecutor"


def test_database_of_the_deployment_is_kept_and_never_shown_with_its_password(tmp_path: Path) -> None:
    home, url = MotleyHome(tmp_path), "postgresql+psycopg2://me:hunter2@127.0.0.1:5/db"
    record = with_workers(RECORD, home, None, url)
    assert with_workers(record, home, None, None).database_url == url
    found = airflow_environment(record, home, {})
    assert found["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] == url
    assert not [name for name in found if "CONNECT_ARGS" in name]

    from cli.deployment_start import _database_name

    assert _database_name(record, home) == "postgresql+psycopg2://127.0.0.1:5/db"


def test_database_of_the_callers_environment_reaches_no_process_by_that_name(tmp_path: Path) -> None:
    home, caller = MotleyHome(tmp_path), {"PATH": "/bin", DATABASE_VARIABLE: "postgresql+psycopg2://me:hunter2@h/db"}
    worker = workers_of(CLUSTER, home)[0]
    for found in (
        airflow_environment(RECORD, home, caller),
        worker_environment(worker, home.worker_home("trainer"), caller, url="https://hub", jwt_secret="s"),
    ):
        assert "hunter2" not in repr(found)
        assert found["PATH"] == "/bin"


def test_processes_on_sqlite_wait_for_each_others_writes(tmp_path: Path) -> None:
    """Found by the crash campaign: on a crowded machine the driver's 5 s end in status 500."""
    found = airflow_environment(RECORD, MotleyHome(tmp_path), {})
    for name in ("SQL_ALCHEMY_CONNECT_ARGS", "SQL_ALCHEMY_CONNECT_ARGS_ASYNC"):
        module, _, attribute = found[f"AIRFLOW__DATABASE__{name}"].rpartition(".")
        assert getattr(importlib.import_module(module), attribute)["timeout"] >= 30


def test_machine_changed_under_its_running_worker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = with_workers(RECORD, MotleyHome(tmp_path), CLUSTER, None)
    monkeypatch.setattr("cli.deployment_start.is_running", lambda _: True)
    changed = CLUSTER.model_copy(
        update={"machines": (CLUSTER.machines[0], CLUSTER.machines[1].model_copy(update={"queue": "q2"}))}
    )
    assert with_workers(record, MotleyHome(tmp_path), CLUSTER, None) == record
    with pytest.raises(DeploymentError, match=r"Machine sampler changed in the cluster file \(queue q-sam"):
        with_workers(record, MotleyHome(tmp_path), changed, None)


def test_typo_in_a_machine_name_names_the_machines_there_are() -> None:
    with pytest.raises(InputError, match="Cluster two-machines has no machine 'traner'; its machines are trainer, sam"):
        find_machine(CLUSTER, "traner")


def test_name_of_a_living_worker_is_refused_and_that_of_a_dead_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment_workers.time, "sleep", lambda _: None)
    beating = [[reported("sampler", age_s=age)] for age in (9.0, 1.0)]
    with pytest.raises(InputError, match=r"Machine sampler has a worker already \(state idle, last heard of at"):
        wait_until_free(api_of(*beating), "sampler")
    silent = reported("sampler", "running")
    missed = {**silent, "state": "unknown"}
    assert wait_until_free(api_of([silent], [silent], [missed]), "sampler") is None
    assert wait_until_free(api_of([]), "sampler") is None


def test_queue_counts_as_served_by_a_living_worker_only() -> None:
    api = api_of([reported("trainer"), reported("sampler", "offline")])
    assert missing_queues(api, ["q-trainer", "q-sampler"]) == ["q-sampler"]


@pytest.mark.parametrize(
    ("sampler", "verdicts", "words"),
    [
        ({}, ["good", "good"], ""),
        (None, ["good", "bad"], "no worker of that name has ever reported itself"),
        ({"age_s": 500}, ["good", "bad"], "last heard of 5"),
        ({"state": "unknown"}, ["good", "bad"], "worker is unknown"),
        ({"queues": ["x"]}, ["good", "bad"], "serves ['x'], not q-sampler"),
        ({"sysinfo": {}}, ["good", "bad"], "was started for (None, None, None)"),
        ({"state": "maintenance mode"}, ["good", "note"], "maintenance mode"),
    ],
)
def test_doctor_says_of_every_machine_whether_its_worker_is_what_the_file_says(
    tmp_path: Path, sampler: dict[str, Any] | None, verdicts: list[str], words: str
) -> None:
    workers = [reported("trainer"), *([] if sampler is None else [reported("sampler", **sampler)])]
    record = with_workers(RECORD, MotleyHome(tmp_path), CLUSTER, None)
    findings = check_cluster(CLUSTER, record, api_of(workers))
    assert [finding.verdict.value for finding in findings] == verdicts
    assert words in findings[1].found
    assert all(finding.remedy for finding in findings if finding.verdict is Verdict.BAD)


def test_doctor_knows_that_several_machines_need_workers() -> None:
    finding = check_cluster(CLUSTER, RECORD, api_of([]))[0]
    assert (finding.verdict, finding.found) == (
        Verdict.BAD, "two-machines has 2 machines, the deployment has no workers",
    )  # fmt: skip


def test_facts_of_a_process_that_is_no_worker_are_empty() -> None:
    assert worker_facts(None) == {}
