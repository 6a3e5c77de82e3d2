from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cli import follow as follow_module
from cli.deployment_api import AirflowApi
from cli.errors import DeploymentError, RunFailedError
from cli.follow import RunFollower, record_line
from stages.home import dag_id_of
from stages.run_entry import MachineEntry, RunEntry
from storage.documents import model_bytes
from storage.layout import policy_head
from storage.policies import PolicyHead
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from tests.helpers.airflow_server import AirflowServer, task

ENTRY = RunEntry(
    run="demo",
    roots={"local": "file:///data"},
    machines=(MachineEntry(name="box", queue="gpu", region="local"),),
    iterations=4,
)
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def server() -> AirflowServer:
    return AirflowServer(dag_id_of("demo"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


@pytest.fixture
def follower(server: AirflowServer, store: Store) -> RunFollower:
    return RunFollower(api=AirflowApi("http://127.0.0.1:1", transport=server.transport()), store=store, entry=ENTRY)


def commit(store: Store, version: int) -> None:
    head = PolicyHead(version=version, weights_hash="0" * 64, rollbacks=())
    store.publish(policy_head("demo"), model_bytes(head, policy_head("demo")))


def record(iteration: int, **changes: object) -> IterationRecord:
    facts = {
        "run": "demo",
        "iteration": iteration,
        "started_at": START,
        "ended_at": START + timedelta(seconds=20),
        "metrics": {"reward_mean": 0.5, "tokens_per_s": 1234.4},
    }
    return IterationRecord.model_validate(facts | changes)


def test_first_look_before_any_dag_run_sees_nothing(follower: RunFollower) -> None:
    progress = follower.poll()
    assert progress is not None
    assert (progress.iteration, progress.stages, progress.events, progress.is_finished) == (None, (), (), False)


def test_look_says_which_rows_are_at_work_and_what_ended(follower: RunFollower, server: AirflowServer) -> None:
    server.states = {0: "success", 1: "running"}
    server.tasks = {
        1: [task("plan", "success", duration=2.5), task("generate.gpu", "running"), task("train.gpu", None)]
    }
    progress = follower.poll()
    assert progress is not None
    assert (progress.iteration, progress.stages, progress.num_done) == (1, ("generate.gpu",), 1)
    assert progress.events == ("iteration 1: plan done 2.5 s",)
    server.tasks[1][1] = task("generate.gpu", "up_for_retry")
    again = follower.poll()
    assert again is not None
    assert again.events == ("iteration 1: generate.gpu failed and is tried again",)


def test_last_tasks_of_a_run_that_ended_between_two_looks_are_told(
    follower: RunFollower, server: AirflowServer
) -> None:
    server.states, server.tasks = {0: "running"}, {0: [task("report", "running")]}
    follower.poll()
    server.states, server.tasks = {0: "success"}, {0: [task("report", "success")]}
    progress = follower.poll()
    assert progress is not None
    assert progress.events == ("iteration 0: report done 1.0 s",)


def test_committed_record_gives_a_line_and_the_time_that_is_left(
    follower: RunFollower, server: AirflowServer, store: Store
) -> None:
    server.states = {0: "success"}
    write_iteration(store, record(0))
    progress = follower.poll()
    assert progress is not None
    assert progress.events == ("iteration 0 done (1/4)  reward 0.500  tokens/s 1234  20.0 s",)
    assert progress.eta_s == 60.0


def test_run_is_finished_when_airflow_and_the_data_say_so(
    follower: RunFollower, server: AirflowServer, store: Store
) -> None:
    server.states = dict.fromkeys(range(4), "success")
    commit(store, 3)
    before = follower.poll()
    commit(store, 4)
    after = follower.poll()
    assert before is not None
    assert after is not None
    assert (before.is_finished, after.is_finished) == (False, True)


def test_failure_that_stands_ends_the_following_with_iteration_row_and_remedy(
    follower: RunFollower, server: AirflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "SETTLE_S", -1.0)
    server.states, server.tasks = {0: "success", 1: "failed"}, {1: [task("train.gpu", "failed")]}
    with pytest.raises(RunFailedError, match=r"iteration 1 failed in train.gpu; .*`motley resume demo`"):
        follower.poll()


@pytest.mark.parametrize(
    "tasks",
    [[task("generate.gpu", "running")], [task("plan", "success"), task("train.gpu", None)], []],
)
def test_failure_is_not_the_end_while_another_run_goes_on(
    follower: RunFollower, server: AirflowServer, monkeypatch: pytest.MonkeyPatch, tasks: list[dict[str, object]]
) -> None:
    monkeypatch.setattr(follow_module, "SETTLE_S", -1.0)
    server.states, server.tasks = {1: "failed", 2: "running"}, {2: tasks}
    assert follower.poll() is not None


def test_failure_is_the_end_when_the_others_are_held_at_the_gate(
    follower: RunFollower, server: AirflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "SETTLE_S", -1.0)
    server.states = {1: "failed", 2: "running"}
    server.tasks = {1: [task("train.gpu", "failed")], 2: [task("plan", "success"), task("wait_for_policy", "deferred")]}
    with pytest.raises(RunFailedError, match="iteration 1 failed"):
        follower.poll()


def test_airflow_that_stays_silent_ends_the_following_with_the_remedy(
    follower: RunFollower, server: AirflowServer
) -> None:
    server.is_down = True
    looks = [follower.poll() for _ in range(follow_module.MAX_UNANSWERED - 1)]
    assert looks == [None] * (follow_module.MAX_UNANSWERED - 1)
    with pytest.raises(DeploymentError, match="continue it with `motley resume demo`"):
        follower.poll()


def test_record_line_shows_alarms() -> None:
    line = record_line(record(3, alarms=["reward is constant"]), 4)
    assert line == "iteration 3 done (4/4)  reward 0.500  tokens/s 1234  20.0 s  ALARM reward is constant"
