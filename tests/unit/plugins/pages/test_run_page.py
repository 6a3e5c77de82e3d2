"""The page *Run*, and what is said where there is nothing to show."""

from __future__ import annotations

import re
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from plugins.pages.run_source import RunSource
from stages.home import MotleyHome
from stages.runs import entry_of
from storage.layout import iteration_record, run_record
from storage.runs import write_iteration
from storage.store import open_store
from storage.superseded import rewind
from tests.helpers.page_runs import DAG_ID, client_of, record_of, sentence, write_run
from tests.helpers.stage_contexts import make_run
from tests.helpers.storage_builders import NOW, RUN


def test_shows_a_curve_for_every_metric_that_the_run_has(client: TestClient) -> None:
    text = client.get(f"/dags/{DAG_ID}/run").text
    titles = re.findall(r'<span class="plot-title">([^<]*)', text)
    assert titles == [
        "Reward", "Response length", "KL to the reference", "Entropy", "Loss", "Staleness", "Throughput", "Overhead",
        "Left out and cut", "plan", "generate", "infer", "train", "commit_policy",
    ]  # fmt: skip
    assert "4 of 6 iterations committed" in text
    assert 'aria-label="Reward: training last 0.215; held out last 0.3"' in text
    assert "measured last 10; predicted last 9" in text


def test_lists_alarms_and_plans_with_their_iteration(client: TestClient) -> None:
    rows = re.findall(
        r'<tr><td class="n">(\d+)</td><td><span class="tag (\w+)">', client.get(f"/dags/{DAG_ID}/run").text
    )
    assert rows == [("2", "plan"), ("1", "alarm"), ("0", "plan")]


def test_dag_itself_leads_to_its_run(client: TestClient) -> None:
    assert client.get(f"/dags/{DAG_ID}").headers["location"] == f"/dags/{DAG_ID}/run"


@pytest.mark.parametrize(
    ("dag_id", "said"),
    [
        ("etl", "DAG 'etl' is no run of Motley: their ids are motley__<run name>."),
        ("motley__nope", f"This deployment has no run 'nope' (runs: {RUN})."),
        ("motley__..", "DAG 'motley__..' is no run of Motley: their ids are motley__<run name>."),
    ],
)
def test_unknown_dag_is_answered_with_a_sentence(client: TestClient, dag_id: str, said: str) -> None:
    assert sentence(client, f"/dags/{dag_id}/run") == (404, said)


def test_run_whose_record_is_gone_is_answered_with_a_sentence(tmp_path: Path, page_home: Path) -> None:
    shutil.copytree(page_home, tmp_path, dirs_exist_ok=True)
    entry = tmp_path / "runs" / f"{RUN}.json"
    entry.write_text(entry.read_text().replace(str(page_home), str(tmp_path)))
    open_store(str(tmp_path / "store")).delete(run_record(RUN))
    status, said = sentence(client_of(tmp_path), f"/dags/{DAG_ID}/run")
    assert (status, said.startswith(f"Run {RUN} has an entry in this deployment, but ")) == (404, True)


def test_run_before_its_first_report_says_so(tmp_path: Path) -> None:
    write_run(MotleyHome(tmp_path), done=0, has_plans=False)
    client = client_of(tmp_path)
    assert "No iteration is reported yet" in client.get(f"/dags/{DAG_ID}/run").text
    assert sentence(client, f"/dags/{DAG_ID}/plan")[1].startswith(f"Run {RUN} has no plan yet")
    assert sentence(client, f"/dags/{DAG_ID}/rollouts")[1].startswith(f"Iteration 0 of run {RUN} has no rollouts yet")


def test_records_are_read_once_and_anew_after_a_rewind(tmp_path: Path) -> None:
    store = write_run(MotleyHome(tmp_path))
    source = RunSource(MotleyHome(tmp_path), lambda _entry, _region: {})
    named = source.named(DAG_ID)
    first = source.records(source.find(named))
    assert [record.iteration for record in first] == [0, 1, 2, 3]
    kept = store.read_bytes(iteration_record(RUN, 1))
    store.publish(iteration_record(RUN, 1), b"{}")  # a second read would refuse this
    assert source.records(source.find(named)) == first
    store.publish(iteration_record(RUN, 1), kept)
    rewind(store, [], RUN, 2, reason="try again", at=NOW)
    write_iteration(store, record_of(2, metrics={"reward_mean": 0.9}, started_at=NOW, ended_at=NOW + timedelta(1)))
    assert [record.iteration for record in source.records(source.find(named))] == [0, 1]
    text = client_of(tmp_path).get(f"/dags/{DAG_ID}/run").text
    assert "rewound from version 4 to 2: try again" in text


def test_job_and_cluster_of_a_record_are_those_of_the_run(tmp_path: Path) -> None:
    """A record holds the whole training job; the pages read the planner's part of it."""
    resolved = make_run(tmp_path)
    home = MotleyHome(tmp_path / "home")
    home.runs_dir.mkdir(parents=True)
    home.run_entry_file("r").write_text(entry_of(resolved).to_json(), encoding="utf-8")
    source = RunSource(home, lambda _entry, _region: {})
    found = source.find(source.named("motley__r"))
    assert found.job.fingerprint == resolved.job.planner.fingerprint
    assert found.cluster.fingerprint == resolved.cluster.fingerprint
    assert (found.done, found.head) == (0, None)
