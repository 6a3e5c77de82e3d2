"""Pause, stop, retry, extend, rewind, drain, add machines: what is refused, and what Airflow is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli import run_control
from cli.deployment_api import AirflowApi
from cli.deployment_record import DeploymentRecord, Ports
from cli.errors import DeploymentError, InputError
from cli.machines import check_wider, drained_entry, next_iteration
from cli.rewind import check_version
from cli.run_control import LiveRun, check_retry, extended, live_attempts, live_run, stop_run
from cli.run_register import register
from plans.spec.load import load_cluster
from stages.home import MotleyHome, dag_id_of
from stages.run_entry import read_run_entry
from stages.runs import entry_of, load_run
from storage.documents import model_bytes
from storage.layout import policy_head
from storage.policies import PolicyHead
from storage.store import open_store
from tests.helpers.airflow_server import AirflowServer
from tests.helpers.stage_contexts import CLUSTER, make_run

DEPLOYMENT = DeploymentRecord(
    ports=Ports(api=1, worker_logs=2, trigger_logs=3), airflow_python="python", engines_python="python"
)


@pytest.fixture
def server() -> AirflowServer:
    return AirflowServer(dag_id_of("r"))


@pytest.fixture
def live(tmp_path: Path, server: AirflowServer) -> LiveRun:
    run = make_run(tmp_path)
    api = AirflowApi("http://127.0.0.1:1", transport=server.transport())
    return LiveRun(MotleyHome(tmp_path / "home"), DEPLOYMENT, api, entry_of(run))


def commit(live: LiveRun, version: int) -> None:
    head = PolicyHead(version=version, weights_hash="0" * 64)
    open_store(live.entry.root).publish(policy_head("r"), model_bytes(head, policy_head("r")))


def test_stop_pauses_first_then_fails_what_is_active(live: LiveRun, server: AirflowServer) -> None:
    server.states = {0: "success", 1: "running", 2: "queued"}
    server.backfills = [{"id": 1, "completed_at": None}]
    assert stop_run(live) == [1, 2]
    assert (server.is_paused, server.states) == (True, {0: "success", 1: "failed", 2: "failed"})
    changes = [path for method, path in server.requests if method in ("PATCH", "PUT")]
    assert changes[0] == f"/api/v2/dags/{live.dag_id}"
    assert changes[1] == "/api/v2/backfills/1/cancel"
    assert changes[2:] == [f"/api/v2/dags/{live.dag_id}/dagRuns/run-{k}" for k in (1, 2)]


def test_stop_says_so_when_a_run_does_not_end(
    live: LiveRun, server: AirflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.states = {1: "running"}
    monkeypatch.setattr(run_control, "STOP_TIMEOUT_S", -1.0)
    monkeypatch.setattr(AirflowApi, "fail_run", lambda *_: None)
    with pytest.raises(DeploymentError, match=r"Iteration\(s\) \[1\] of run r do not end"):
        stop_run(live)


@pytest.mark.parametrize(
    ("iteration", "states", "sentence"),
    [
        (1, {}, r"Iteration 1 of run r is done \(policy version 2 is committed\); to make it anew, use `motley rewind"),
        (3, {}, "Iteration 3 of run r follows iteration 2, which is not done"),
        (5, {}, "Run r has iterations 0 to 4, so there is no iteration 5"),
        (2, {2: "running"}, "Iteration 2 of run r is at work"),
    ],
)
def test_iteration_whose_turn_it_is_not_is_not_retried(
    live: LiveRun, server: AirflowServer, iteration: int, states: dict[int, str], sentence: str
) -> None:
    commit(live, 2)
    server.states = states
    with pytest.raises(InputError, match=sentence):
        check_retry(live, iteration)


def test_failed_iteration_may_be_retried(live: LiveRun, server: AirflowServer) -> None:
    commit(live, 2)
    server.states = {2: "failed"}
    assert check_retry(live, 2) is None


def test_extension_reaches_record_and_entry_and_never_cuts(live: LiveRun) -> None:
    assert extended(live.entry, 9).iterations == 9
    assert load_run(live.entry.root, "r").iterations == 9
    with pytest.raises(InputError, match="has 5 iterations and can't be cut to 3"):
        extended(live.entry, 3)


@pytest.mark.parametrize(
    ("head", "version", "sentence"),
    [
        (None, 0, "Run r has trained no policy version yet"),
        (0, 0, "Run r has trained no policy version yet"),
        (3, 3, r"can go back to the policy versions 0 to 2 \(its newest is 3\), not to 3"),
    ],
)
def test_rewind_to_what_is_no_earlier_version_is_refused(
    live: LiveRun, head: int | None, version: int, sentence: str
) -> None:
    if head is not None:
        commit(live, head)
    with pytest.raises(InputError, match=sentence):
        check_version(live, version)


def test_fork_can_not_go_back_before_its_first_version(live: LiveRun) -> None:
    commit(live, 4)
    forked = replace(live, entry=live.entry.model_copy(update={"first_iteration": 2}))
    with pytest.raises(InputError, match="policy versions 2 to 3"):
        check_version(forked, 1)


def test_drained_machine_stands_in_record_and_entry_and_can_be_taken_back(live: LiveRun) -> None:
    drained = drained_entry(live, "b0", is_undone=False)
    assert (drained.drained, load_run(live.entry.root, "r").drained) == (("b0",), ("b0",))
    control, other = drained.machines
    assert (drained.queue_of(control), drained.queue_of(other)) == (control.queue, control.queue)
    with pytest.raises(InputError, match="Machine b0 of run r is drained already"):
        drained_entry(live, "b0", is_undone=False)
    assert drained_entry(live, "b0", is_undone=True).drained == ()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("b1", "Cluster two-regions has no machine 'b1'; its machines are a0, b0"),
        ("a0", "Machine a0 plans, commits and reports for run r, so it can't be drained"),
    ],
)
def test_machine_that_can_not_be_drained_is_refused(live: LiveRun, name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        drained_entry(live, name, is_undone=False)


def test_next_iteration_is_the_first_that_has_not_begun(live: LiveRun, server: AirflowServer) -> None:
    commit(live, 2)
    assert next_iteration(live) == 2
    server.states = {2: "running", 3: "queued"}
    assert next_iteration(live) == 4


def wider(text: str = "", **changes: str) -> str:
    document = CLUSTER.format(base="base")
    for old, new in changes.items():
        document = document.replace(old, new)
    return document.replace("links:", f"{text}links:") if text else document


def test_cluster_that_goes_on_from_the_runs_names_what_is_new() -> None:
    before = load_cluster(wider(), "before")
    after = load_cluster(
        wider("  - {name: b1, region: b, gpu: cpu, count: 1}\n").replace(
            "links: {regions:", "links: {same_zone: {latency_ms: 0, bandwidth_gbps: 10}, regions:"
        ),
        "after",
    )
    assert check_wider(before, after, "r") == ["b1"]
    with pytest.raises(InputError, match="has no machine that run r does not have already"):
        check_wider(before, before, "r")


def test_cluster_file_changed_under_a_run_is_refused_with_what_changed() -> None:
    before = load_cluster(wider(), "before")
    changed = load_cluster(wider().replace("gpu: cpu, count: 1", "gpu: L4, count: 1"), "after")
    with pytest.raises(InputError, match=r"does not go on from that of run r: b0 changed\. A run keeps its machines"):
        check_wider(before, changed, "r")
    renamed = load_cluster(wider().replace("name: b0", "name: b9"), "after")
    with pytest.raises(InputError, match="b0 is missing"):
        check_wider(before, renamed, "r")


def test_run_of_a_deployment_that_is_down_stands_still(tmp_path: Path, live: LiveRun) -> None:
    home = MotleyHome(tmp_path / "home")
    register(live.entry, home)
    assert read_run_entry(home.run_entry_file("r")) == live.entry
    with pytest.raises(DeploymentError, match="is down, so run r stands still; start it with `motley up`"), \
            live_run("r", home):  # fmt: skip
        pass


def test_live_stage_processes_of_a_run_are_found_in_every_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = MotleyHome(tmp_path)
    folders = [
        tmp_path / "state" / "a" / "jobs" / "r" / "000001" / "train.q" / "f" / "attempt-001",
        tmp_path / "workers" / "b" / "state" / "b" / "jobs" / "r" / "000001" / "train.q" / "f" / "attempt-001",
        tmp_path / "state" / "a" / "jobs" / "other" / "000001" / "train.q" / "f" / "attempt-001",
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.setattr("stages.launch.StageAttempt.is_alive", lambda _: True)
    assert sorted(attempt.folder for attempt in live_attempts(home, "r")) == sorted(folders[:2])
