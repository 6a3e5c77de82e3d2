from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from plugins.alert_callbacks import alerts_of, report_done, stage_failed
from plugins.iteration_dag import build_run_dag
from stages.errors import DeadlineError, NumericsError
from stages.home import logical_date_of
from stages.run_entry import MachineEntry, RunEntry
from storage.alerts import list_alerts
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from tests.helpers.kept_alerts import told, write_settings

ALARMS = ["no_signal in 3 iterations in a row: too easy", "the disk is nearly full"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path / "home"))
    return open_store(str(tmp_path / "store"))


def task_of(tmp_path: Path, task_id: str) -> Any:
    box = MachineEntry(name="box", queue="q", region="here")
    entry = RunEntry(run="demo", roots={"here": str(tmp_path / "store")}, machines=(box,), iterations=9)
    return build_run_dag(entry).get_task(task_id)


def context(tmp_path: Path, task_id: str, iteration: int, try_number: int = 4, **more: Any) -> Any:
    return {
        "task": task_of(tmp_path, task_id), "dag_run": SimpleNamespace(logical_date=logical_date_of(iteration)),
        "ti": SimpleNamespace(task_id=task_id, try_number=try_number), "run_id": f"scheduled__demo.{iteration}", **more,
    }  # fmt: skip


def reported(iteration: int, *kinds: str) -> IterationRecord:
    return IterationRecord(
        run="demo", iteration=iteration, alarms=ALARMS[: len(kinds)], metadata={"alarm_kinds": list(kinds)}
    )


def run_callbacks(callbacks: Any, given: Any) -> None:
    assert callbacks
    for callback in callbacks:
        callback(given)


def test_the_report_task_hands_every_alarm_of_its_iteration_on(store: Store, tmp_path: Path) -> None:
    file = write_settings(tmp_path / "home", "FileNotifier")
    write_iteration(store, reported(4, "no_signal", "disk"))
    given = context(tmp_path, "report", 4)
    run_callbacks(given["task"].on_success_callback, given)
    assert told(file) == [
        f"no_signal of demo: run demo, iteration 4: {ALARMS[0]}",
        f"disk of demo: run demo, iteration 4: {ALARMS[1]}",
    ]

    write_iteration(store, reported(5, "no_signal"))
    report_done(context(tmp_path, "report", 5))
    assert len(told(file)) == 2  # it lasts, and was told a moment ago
    assert {alert.iteration for alert in list_alerts(store, "demo")} == {4}


def test_a_report_without_alarms_or_without_a_record_tells_nothing(store: Store, tmp_path: Path) -> None:
    file = write_settings(tmp_path / "home", "FileNotifier")
    report_done(context(tmp_path, "report", 4))
    write_iteration(store, reported(4))
    report_done(context(tmp_path, "report", 4))
    assert told(file) == []
    assert alerts_of(IterationRecord(run="demo", iteration=1, alarms=["of older code"])) == []


@pytest.mark.parametrize(
    ("task_id", "error", "kind"),
    [
        ("train.q", NumericsError("loss was not finite in 3 steps in a row"), "non_finite"),
        ("wait_for_policy", DeadlineError("policy version 6 was not committed within 60 s"), "stalled"),
        ("generate.q", ValueError("no such token"), "failed"),
    ],
)
def test_a_task_that_failed_for_good_is_told_with_what_it_said(
    store: Store, tmp_path: Path, task_id: str, error: Exception, kind: str
) -> None:
    file = write_settings(tmp_path / "home", "FileNotifier")
    given = context(tmp_path, task_id, 6, exception=error)
    run_callbacks(given["task"].on_failure_callback, given)
    (text,) = told(file)
    assert text.startswith(f"{kind} of demo: run demo, iteration 6: task {task_id} failed for good at try 4: ")
    assert str(error) in text
    assert "motley resume demo" in text

    run_callbacks(given["task"].on_failure_callback, given)
    assert len(told(file)) == 1  # Airflow may call twice for one failure
    stage_failed(context(tmp_path, task_id, 6, try_number=8, exception=error))
    assert len(told(file)) == 2  # after a resume it failed again


def test_a_killed_task_is_told_without_an_exception(store: Store, tmp_path: Path) -> None:
    stage_failed(context(tmp_path, "train.q", 2))
    (alert,) = list_alerts(store, "demo")
    assert "its process ended without a word (killed, or out of memory?)" in alert.sentence
    assert (datetime.now(UTC) - alert.raised_at).total_seconds() < 3600


def test_every_task_of_a_run_has_the_failure_callback(tmp_path: Path) -> None:
    dag = task_of(tmp_path, "report").dag
    assert {task.task_id for task in dag.tasks if not task.on_failure_callback} == set()
    assert [task.task_id for task in dag.tasks if task.on_success_callback] == ["report"]
