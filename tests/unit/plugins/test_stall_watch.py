from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.serialization.serialized_objects import DagSerialization

from plugins import stall_watch
from plugins.iteration_dag import build_run_dag
from plugins.stall_watch import Look, look, watch_iteration
from stages.home import MotleyHome, logical_date_of
from stages.run_entry import MachineEntry, RunEntry
from storage.alerts import list_alerts
from storage.policies import publish_policy
from storage.runs import IterationRecord, RunRecord, create_run, write_iteration
from storage.store import Store, open_store
from tests.helpers.kept_alerts import told, write_settings
from tests.helpers.storage_builders import policy_files


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MotleyHome:
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stall_watch, "_SHORTEST_S", 0.01)
    monkeypatch.setattr(stall_watch, "_LONGEST_S", 0.01)
    return MotleyHome(tmp_path / "home")


@pytest.fixture
def store(home: MotleyHome, tmp_path: Path) -> Store:
    box = MachineEntry(name="box", queue="q", region="here")
    entry = RunEntry(
        run="demo", roots={"here": str(tmp_path / "store")}, machines=(box,), iterations=9, stall_check_s=100.0
    )
    home.runs_dir.mkdir(parents=True)
    home.run_entry_file("demo").write_text(entry.to_json())
    made = open_store(str(tmp_path / "store"))
    now = datetime.now(UTC)
    create_run(made, RunRecord(run="demo", job={}, cluster={}, num_iterations=9, seeds={}, created_at=now))
    return made


def report(store: Store, iteration: int, ago_s: float, took_s: float = 20.0) -> None:
    end = datetime.now(UTC) - timedelta(seconds=ago_s)
    start = end - timedelta(seconds=took_s)
    write_iteration(store, IterationRecord(run="demo", iteration=iteration, started_at=start, ended_at=end))


def policies(store: Store, head: int) -> None:
    for version in range(head + 1):
        publish_policy(store, "demo", version, policy_files(version), created_by="test", is_head=True)


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


def dag_run(iteration: int, queued_ago_s: float) -> dict[str, Any]:
    return {
        "dag_run": {
            "dag_id": "motley__demo", "dag_run_id": f"scheduled__demo.{iteration}", "state": "running",
            "logical_date": logical_date_of(iteration).isoformat(), "queued_at": ago(queued_ago_s).isoformat(),
            "run_after": logical_date_of(iteration).isoformat(),
        }
    }  # fmt: skip


def airflow_says(monkeypatch: pytest.MonkeyPatch, *states: str) -> None:
    """The states of the DAG run at the looks, in order."""
    said = iter(states)
    monkeypatch.setattr(RuntimeTaskInstance, "get_dagrun_state", staticmethod(lambda dag_id, run_id: next(said)))


@pytest.mark.parametrize(
    ("reported_ago_s", "took_s", "queued_ago_s", "is_stalled"),
    [
        (150.0, 5.0, 150.0, True),
        (50.0, 5.0, 500.0, False),  # another iteration ended: the run moves
        (150.0, 20.0, 150.0, False),  # ten times the usual 20 s have not passed
        (250.0, 20.0, 240.0, True),
        (90_000.0, 5.0, 50.0, False),  # it was stopped for a day
    ],
)
def test_a_run_is_stalled_after_ten_times_its_usual_seconds_without_a_report(
    store: Store, reported_ago_s: float, took_s: float, queued_ago_s: float, is_stalled: bool
) -> None:
    policies(store, 2)
    report(store, 0, reported_ago_s + took_s, took_s)
    report(store, 1, reported_ago_s, took_s)
    assert look("demo", 2, ago(queued_ago_s)).is_stalled is is_stalled


def test_the_first_iteration_is_stalled_after_the_least_limit(store: Store) -> None:
    seen = look("demo", 0, ago(101.0))
    assert (seen.is_stalled, seen.limit_s, seen.head) == (True, 100.0, None)


def test_an_iteration_whose_policy_is_committed_is_done(store: Store) -> None:
    policies(store, 3)
    assert look("demo", 2, ago(9000.0)).is_done
    assert not Look(is_done=True, silence_s=9.0, limit_s=1.0, head=3).is_stalled


def test_the_watch_tells_once_and_ends_with_the_dag_run(
    store: Store, home: MotleyHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_settings(home.path, "FileNotifier")
    policies(store, 2)
    report(store, 1, 300.0)
    airflow_says(monkeypatch, "running", "running", "running", "failed")
    ended = asyncio.run(watch_iteration("demo", context=dag_run(2, 290.0)))
    assert ended == "the DAG run of iteration 2 ended: failed"
    (text,) = told(file)
    assert text.startswith("stalled of demo: run demo, iteration 2: no iteration ended for 29")
    assert "policy version 2 is the newest that is committed: training waits for generation of iteration 2" in text
    assert [alert.matter for alert in list_alerts(store, "demo")] == ["stalled-000002"]


def test_iterations_that_wait_for_the_same_one_tell_it_once(
    store: Store, home: MotleyHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_settings(home.path, "FileNotifier")
    policies(store, 2)
    for iteration in (2, 3, 4):
        airflow_says(monkeypatch, "running", "success")
        asyncio.run(watch_iteration("demo", context=dag_run(iteration, 290.0)))
    assert len(told(file)) == 1


def test_a_watch_that_airflow_can_not_answer_goes_on_by_the_committed_data(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dag_id: str, run_id: str) -> str:
        raise ConnectionError("away")

    monkeypatch.setattr(RuntimeTaskInstance, "get_dagrun_state", staticmethod(refuse))
    policies(store, 3)
    assert asyncio.run(watch_iteration("demo", context=dag_run(2, 290.0))) == "iteration 2 is committed"


def test_a_watch_of_a_run_whose_entry_is_gone_ends_with_the_dag_run(
    home: MotleyHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    airflow_says(monkeypatch, "running", "failed")
    assert asyncio.run(watch_iteration("demo", context=dag_run(0, 290.0))).endswith("ended: failed")


def test_only_a_run_that_asks_for_it_has_a_deadline(tmp_path: Path) -> None:
    box = MachineEntry(name="box", queue="q", region="here")
    entry = RunEntry(run="demo", roots={"here": str(tmp_path)}, machines=(box,), iterations=9)
    assert build_run_dag(entry).deadline is None
    asked = [build_run_dag(entry.model_copy(update={"stall_check_s": 90.0})) for _ in range(2)]
    (deadline,) = asked[0].deadline or ()
    assert (deadline.interval, deadline.callback.path) == (timedelta(seconds=90), stall_watch.CALLBACK)
    assert deadline.callback.kwargs == {"run": "demo"}
    first, second = (SerializedDagModel.hash(DagSerialization.to_dict(dag)) for dag in asked)
    assert first == second
