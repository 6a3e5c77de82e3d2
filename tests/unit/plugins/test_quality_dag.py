from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from airflow.serialization.serialized_objects import DagSerialization

from plugins.assets import rollouts_asset
from plugins.iteration_dag import build_run_dag, build_run_dags, dags_of
from plugins.quality_dag import build_quality_dag
from plugins.run_dags import find_run_dags
from stages.errors import ContractError
from stages.run_entry import MachineEntry, RunEntry
from storage.errors import ObjectMissingError
from storage.quality import read_quality_report
from storage.store import open_store
from tests.helpers.storage_builders import RUN, new_run, write_iteration_data


def entry(root: str = "/data", **changes: Any) -> RunEntry:
    facts: dict[str, Any] = {
        "run": RUN, "roots": {"here": root}, "iterations": 3, "has_quality_report": True,
        "machines": (MachineEntry(name="box", queue="q", region="here"),),
    }  # fmt: skip
    return RunEntry(**{**facts, **changes})


def context(key: str | None) -> Any:
    return {"dag_run": SimpleNamespace(partition_key=key)}


def test_only_a_job_that_asks_for_reports_has_the_asset_and_the_second_dag() -> None:
    assert f"motley_quality__{RUN}" not in dags_of(entry(has_quality_report=False))
    assert build_run_dag(entry(has_quality_report=False)).get_task("report").outlets == []
    assert f"motley_quality__{RUN}" in dags_of(entry())
    outlets = {task.task_id: task.outlets for task in build_run_dag(entry()).tasks if task.outlets}
    assert outlets == {"report": [rollouts_asset(RUN)]}


def test_the_quality_dag_is_serialised_alike_and_waits_for_partitions() -> None:
    first, second = (DagSerialization.to_dict(build_quality_dag(entry())) for _ in range(2))
    assert json.dumps(first, sort_keys=True, default=str) == json.dumps(second, sort_keys=True, default=str)
    assert type(build_quality_dag(entry()).timetable).__name__ == "PartitionedAssetTimetable"


@pytest.mark.parametrize("wanted", [f"motley__{RUN}", f"motley_quality__{RUN}"])
def test_a_process_finds_both_dags_by_the_id_of_either(tmp_path: Path, wanted: str) -> None:
    home = tmp_path / "runs"
    home.mkdir()
    (home / f"{RUN}.json").write_text(entry().to_json())
    assert wanted in build_run_dags([home / f"{RUN}.json"], wanted=wanted)
    assert wanted in find_run_dags({"MOTLEY_HOME": str(tmp_path)}, wanted=wanted)
    assert find_run_dags({"MOTLEY_HOME": str(tmp_path)}, wanted="motley_quality__other") == {}


def test_the_operator_writes_the_report_of_its_partition(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    new_run(store)
    write_iteration_data(store, 1)
    operator: Any = build_quality_dag(entry(str(tmp_path))).get_task("quality_report")
    done = operator.execute(context("iter-000001"))
    assert done == {"artefacts": [f"{RUN}/iterations/1/quality.json"], "faults": []}
    assert read_quality_report(store, RUN, 1).totals["rows"] == 8
    with pytest.raises(ObjectMissingError, match="no committed rollouts of iteration 2"):
        operator.execute(context("iter-000002"))
    with pytest.raises(ContractError, match="partition key is None"):
        operator.execute(context(None))
