from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("airflow.sdk")

from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

from plugins.iteration_dag import dags_of
from plugins.rescore_dag import build_rescore_dag, request_of
from plugins.run_dags import find_run_dags
from stages.errors import ContractError, StageError
from stages.home import ENGINES_PYTHON_VARIABLE
from stages.run_entry import MachineEntry, RunEntry
from stages.runs import entry_of
from tests.helpers.scored_run import write_scored_run

ENTRY = RunEntry(
    run="demo", roots={"here": "/data"}, iterations=12, first_iteration=8,
    machines=(MachineEntry(name="a", queue="q-a", region="here"), MachineEntry(name="b", queue="q-b", region="here")),
)  # fmt: skip


def form(entry: RunEntry = ENTRY, **filled_in: Any) -> dict[str, Any]:
    """What Airflow makes of what somebody fills in."""
    params = build_rescore_dag(entry).params
    params.update(filled_in)
    params.validate()
    return dict(params.dump())


def test_every_run_has_the_dag_which_nothing_but_a_person_starts(tmp_path: Path) -> None:
    assert list(dags_of(ENTRY)) == ["motley__demo", "motley_rescore__demo"]
    assert list(dags_of(ENTRY, "motley_rescore__demo")) == ["motley_rescore__demo"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo.json").write_text(ENTRY.to_json())
    assert list(find_run_dags({"MOTLEY_HOME": str(tmp_path)}, wanted="motley_rescore__demo")) == [
        "motley_rescore__demo"
    ]

    dag = build_rescore_dag(ENTRY)
    assert not dag.timetable.can_be_scheduled
    assert [(task.task_id, task.queue, task.priority_weight) for task in dag.tasks] == [("rescore", "q-a", 1)]


def test_the_dag_is_serialised_alike() -> None:
    first, second = (DagSerialization.to_dict(build_rescore_dag(ENTRY)) for _ in range(2))
    assert json.dumps(first, sort_keys=True, default=str) == json.dumps(second, sort_keys=True, default=str)


def test_form_becomes_the_request_of_the_command() -> None:
    asked = request_of(ENTRY, form(name="strict", reward="exact_answer", options={"pattern": "x"}, last=9))
    assert asked.model_dump(mode="json", exclude_none=True) == {
        "root": "/data", "run": "demo", "name": "strict", "split": "train", "first": 8, "last": 9,
        "rewards": {"terms": [{"name": "exact_answer", "options": {"pattern": "x"}}]},
    }  # fmt: skip
    section = {"terms": [{"name": "format", "weight": 2.0}], "score_truncated": True}
    assert request_of(ENTRY, form(name="both", rewards=section)).rewards == section


@pytest.mark.parametrize(
    "filled_in",
    [
        {},
        {"name": "../up"},
        {"name": "a", "reward": "nonsense"},
        {"name": "a", "first": -1},
        {"name": "a", "last": "newest"},
        {"name": "a", "split": "test"},
        {"name": "a", "options": []},
    ],
)
def test_form_with_impossible_values_is_refused_by_airflow(filled_in: dict[str, Any]) -> None:
    with pytest.raises(ParamValidationError):
        form(**filled_in)


@pytest.mark.parametrize(
    ("filled_in", "words"),
    [
        ({}, "names no reward"),
        ({"reward": "format", "rewards": {"terms": []}}, "or one and several"),
        ({"rewards": {"terms": []}, "options": {"pattern": "x"}}, "put them into `rewards`"),
        ({"reward": "format", "last": 3}, "last 3 is below first 8"),
    ],
)
def test_form_that_contradicts_itself_is_told_so(filled_in: dict[str, Any], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        request_of(ENTRY, form(name="a", **filled_in))


def test_the_operator_scores_what_the_form_asks_for_and_refuses_what_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINES_PYTHON_VARIABLE, sys.executable)
    run = write_scored_run(tmp_path)
    entry = entry_of(run)
    operator: Any = build_rescore_dag(entry).get_task("rescore")
    asked = form(entry, name="strict", reward="exact_answer")

    done = operator.execute({"params": asked})
    folder = "r/rescored/strict/train"
    assert done == {"folder": folder, "iterations": 2, "rows": 8, "changed": 2}
    file = Path(run.home_root) / folder / "run=r" / "iteration=1" / "rescored.parquet"
    assert pq.read_table(file, columns=["reward"], partitioning=None).column(0).to_pylist() == [1.0, 1.0, 0.0, None]
    before = file.read_bytes()
    assert operator.execute({"params": asked}) == done
    assert file.read_bytes() == before

    with pytest.raises(ContractError, match=r"iteration\(s\) 2, 3 \(yet\); there are: 0 to 1"):
        operator.execute({"params": {**asked, "last": 3}})
    with pytest.raises(ContractError, match="scores of run r by other rewards"):
        operator.execute({"params": {**asked, "options": {"pattern": r"^(\d)$"}}})


def test_the_operator_ends_its_process_when_the_task_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINES_PYTHON_VARIABLE, sys.executable)
    entry = entry_of(write_scored_run(tmp_path))
    operator: Any = build_rescore_dag(entry).get_task("rescore")
    operator.on_kill()  # nothing runs yet
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(operator.execute, {"params": form(entry, name="strict", reward="exact_answer")})
        while operator._process is None:
            time.sleep(0.01)
        operator.on_kill()
        with pytest.raises(StageError, match="ended with exit code -9"):
            running.result()
