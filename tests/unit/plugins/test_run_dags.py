"""Which DAGs a process sees: the entries of its home, or on a worker the run whose task it is to run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("airflow.sdk")

from plugins.run_dags import entry_in_roots, find_run_dags
from stages.home import WORKER_VARIABLE, MotleyHome
from stages.runs import create_run, entry_of
from tests.helpers.stage_contexts import make_run


def worker(base: Path, *roots: str) -> dict[str, str]:
    return {"MOTLEY_HOME": str(base / "far"), WORKER_VARIABLE: json.dumps({"roots": roots})}


def test_worker_makes_the_dag_of_its_task_from_the_runs_record(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = find_run_dags(worker(tmp_path, str(tmp_path / "empty"), run.home_root), wanted="motley__r")
    assert list(found) == ["motley__r"]
    assert "generate.b0" in found["motley__r"].task_ids


def test_worker_sees_an_extension_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert entry_in_roots("r", [run.home_root]) == entry_of(run)
    longer = make_longer(run)
    assert entry_in_roots("r", [run.home_root]) == entry_of(longer)


def make_longer(run):
    from dataclasses import replace

    longer = replace(run, job=run.job.model_copy(update={"iterations": 50}))
    create_run(longer, is_resumed=True)
    return longer


def test_worker_without_the_runs_store_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_run_dags(worker(tmp_path, str(tmp_path / "empty")), wanted="motley__r") == {}
    assert "start it with --root URL of the run's store" in caplog.text


def test_deployment_reads_its_entries_and_no_store(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    home = MotleyHome(tmp_path / "home")
    home.runs_dir.mkdir(parents=True)
    home.run_entry_file("r").write_text(entry_of(run).to_json())
    environment = {"MOTLEY_HOME": str(home.path)}
    assert list(find_run_dags(environment, wanted=None)) == ["motley__r", "motley_rescore__r"]
    assert find_run_dags(environment, wanted="motley__other") == {}
