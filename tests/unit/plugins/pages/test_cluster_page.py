"""The page *Cluster*: workers, queues, speeds and their faults."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from plugins.pages.access import WorkerState
from plugins.pages.cluster_routes import health_of
from tests.helpers.page_runs import client_of, free_access
from tests.helpers.storage_builders import NOW


def worker(state: str = "idle", age_s: float | None = 1.0) -> WorkerState:
    last = None if age_s is None else NOW - timedelta(seconds=age_s)
    facts = {"region": "ohio", "gpu": "L4", "gpu_count": 2, "disk_free_gb": 8.5}
    return WorkerState(name="m1", state=state, queues=("m1",), last_heartbeat=last, jobs_active=0, facts=facts)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (worker(), ""),
        (worker("running", 49), ""),
        (worker(age_s=60), "last heard of 60 s ago; its machine may be gone"),
        (worker(age_s=None), "has never reported itself"),
        (worker("unknown"), "gone: `motley up` or `motley worker --machine m1` starts it again"),
        (worker("maintenance mode"), "in maintenance: takes no new tasks"),
    ],
)
def test_health_of_a_worker_is_a_sentence_when_something_is_wrong(given: WorkerState, said: str) -> None:
    assert health_of(given, NOW) == said


def test_shows_components_workers_queues_and_measured_speeds(page_home: Path) -> None:
    text = client_of(page_home, free_access(workers=[worker("unknown")])).get("/cluster").text
    assert '<span class="tag good">healthy</span> scheduler' in text
    assert '<span class="tag bad">not running</span> triggerer' in text
    assert "gone: `motley up`" in text
    assert '<td>m0</td><td class="n">2</td><td class="n">1</td>' in text
    assert "A100-SXM4-40GB" in text
    assert "bf16 250" in text
    assert "not measured yet" in text  # m1 has no profile


def test_local_executor_has_no_workers(client: TestClient) -> None:
    assert "Tasks run beside the scheduler" in client.get("/cluster").text


def test_run_that_cannot_be_read_does_not_hide_the_others(page_home: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    entry = (page_home / "runs" / "run-1.json").read_text()
    (tmp_path / "runs" / "run-1.json").write_text(entry)
    (tmp_path / "runs" / "run-2.json").write_text(entry.replace('"run-1"', '"run-2"'))
    text = client_of(tmp_path).get("/cluster").text
    assert "A100-SXM4-40GB" in text
    assert "Run run-2: Run run-2 has an entry in this deployment, but" in text
