"""A deployment that watches: alarms, a stall and a failure reach a notifier, and a data team's DAG follows the run.

What it sampled is scored again by a DAG that is triggered over REST.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from cli.deployment_api import AirflowApi
from plugins.quality_dag import QUALITY_PREFIX
from plugins.rescore_dag import RESCORE_PREFIX
from stages.home import dag_id_of
from storage.alerts import list_alerts
from storage.errors import ObjectMissingError
from storage.policies import head_version
from storage.quality import QualityReport, read_quality_report
from tests.helpers.kept_alerts import told, write_settings
from tests.system.deployed import Deployment, deployment, kill, needs_engines, outcome, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(3600),
    needs_engines,
]

SPECS = Path(__file__).parent / "specs"
ITERATIONS = 5
CHANGES: dict[str, Any] = {
    # Every answer matches, so the reward is constant.
    "rewards": {"terms": [{"name": "format", "options": {"pattern": ".*"}}]},
    "limits": {"alarm_iterations": 2, "stall_check_s": 5.0},
    "metrics": {"quality_report": True},
}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("deployed")) as found:
        yield found


@pytest.fixture(scope="module")
def notices(deployed: Deployment) -> Path:
    """The file to which the deployment's notifier writes."""
    return write_settings(deployed.home.path, "FileNotifier")


def kinds(notices: Path) -> set[str]:
    return {text.partition(" ")[0] for text in told(notices)}


def version(found: Deployment) -> int:
    return head_version(found.store, "tiny") or 0


def frozen(found: Deployment) -> list[psutil.Process]:
    """Stop the run's stage process where it stands."""
    processes = found.stage_processes()
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    return processes


def states(found: Deployment, dag_id: str) -> list[str]:
    with AirflowApi(found.record.url) as api:
        return [run["state"] for run in api.dag_runs(dag_id)]


def reports(found: Deployment) -> list[QualityReport]:
    made = []
    for k in range(ITERATIONS):
        try:
            made.append(read_quality_report(found.store, "tiny", k))
        except ObjectMissingError:
            continue
    return made


def test_stalled_run_is_told_while_it_stands_and_goes_on_afterwards(
    deployed: Deployment, notices: Path, tmp_path: Path
) -> None:
    """The watch of the triggerer sees it: nothing of the run says a word."""
    job = yaml.safe_load((SPECS / "tiny_job.yaml").read_text()) | CHANGES
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = deployed.motley(
        "run", "--job", str(tmp_path / "job.yaml"), "--cluster", str(SPECS / "tiny_cluster.yaml"), "--name", "tiny",
        "--iterations", str(ITERATIONS), "--detach",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stopped = until(lambda: frozen(deployed), "a stage process")
    beginning = "stalled of tiny: run tiny, iteration 0: no iteration ended for "
    said = until(lambda: [text for text in told(notices) if text.startswith(beginning)], "the alert of the stall")[0]
    assert "(stalled from 5 s on)" in said
    assert "`motley doctor tiny` says what it waits for" in said
    assert version(deployed) == 0
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    until(lambda: version(deployed) > 0, "the next version")


def test_alarm_of_the_reports_reaches_the_notifier(deployed: Deployment, notices: Path) -> None:
    until(lambda: "constant_reward" in kinds(notices), "the alarm")
    assert any(text.startswith("constant_reward of tiny: run tiny, iteration 1: ") for text in told(notices))


def test_task_that_failed_for_good_is_told_with_its_reason_and_the_run_is_resumed(
    deployed: Deployment, notices: Path
) -> None:
    until(lambda: kill(deployed.stage_processes()) * 0 or "failed" in states(deployed, dag_id_of("tiny")), "a failure")
    until(lambda: "failed" in kinds(notices), "the alert of the failure")
    said = next(text for text in told(notices) if text.startswith("failed of tiny: "))
    assert "failed for good at try " in said
    assert "then `motley resume tiny`" in said
    finished = outcome(deployed.motley("resume", "tiny", "--json"))
    assert (finished["state"], finished["policy_version"]) == ("finished", ITERATIONS)


def test_what_was_told_is_kept_with_the_run_and_an_alarm_that_lasts_is_told_once(
    deployed: Deployment, notices: Path
) -> None:
    kept = {alert.kind: alert for alert in list_alerts(deployed.store, "tiny")}
    assert {"constant_reward", "failed", "stalled"} <= set(kept)
    assert not any(alert.faults for alert in kept.values())
    texts = told(notices)
    assert len([text for text in texts if text.startswith("constant_reward of tiny: ")]) == 1
    assert all(len(json.dumps(text)) < 2000 for text in texts)


def test_every_iteration_has_a_quality_report_made_by_a_dag_of_its_own(deployed: Deployment) -> None:
    made = until(lambda: (found := reports(deployed)) and len(found) == ITERATIONS and found, "the quality reports")
    assert [report.iteration for report in made] == list(range(ITERATIONS))
    for report in made:  # an answer that was cut has no reward
        assert sum(report.counts["reward_status"].values()) == report.totals["rows"] == 64
    assert all("flat_fraction" in report.faults for report in made)
    until(lambda: set(states(deployed, f"{QUALITY_PREFIX}tiny")) == {"success"}, "the end of its DAG runs")
    with AirflowApi(deployed.record.url) as api:
        assert api.num_versions(f"{QUALITY_PREFIX}tiny") == 1
        assert api.num_versions(dag_id_of("tiny")) == 1


RESCORE_DAG = f"{RESCORE_PREFIX}tiny"
FORM: dict[str, Any] = {
    "name": "strict", "first": 1, "last": 3, "reward": "format", "options": {"pattern": "no answer is like this"},
}  # fmt: skip


def triggered(found: Deployment, form: dict[str, Any]) -> httpx.Response:
    """Trigger the DAG that scores again, as the form in Airflow's UI does."""
    with httpx.Client(base_url=found.record.url, timeout=120.0) as client:
        token = client.get("/auth/token").json()["access_token"]
        return client.post(
            f"/api/v2/dags/{RESCORE_DAG}/dagRuns", json={"logical_date": None, "conf": form},
            headers={"Authorization": f"Bearer {token}"},
        )  # fmt: skip


def scored_again(found: Deployment, form: dict[str, Any]) -> str:
    """Return the state in which a DAG run with this form ends."""
    answer = triggered(found, form)
    assert answer.is_success, answer.text
    run_id = answer.json()["dag_run_id"]

    def ended() -> str | None:
        with AirflowApi(found.record.url) as api:
            runs = {run["dag_run_id"]: str(run["state"]) for run in api.dag_runs(RESCORE_DAG)}
        return runs[run_id] if runs[run_id] in ("success", "failed") else None

    return str(until(ended, f"the end of {run_id}"))


def test_iterations_are_scored_again_from_airflow_and_the_same_form_makes_the_same_files(deployed: Deployment) -> None:
    """Every answer matched; the reward of the form wants what none of them has."""
    assert scored_again(deployed, FORM) == "success"
    folder = deployed.home.store_dir / "tiny" / "rescored" / "strict" / "train" / "run=tiny"
    files = [folder / f"iteration={k}" / "rescored.parquet" for k in (1, 2, 3)]
    assert sorted(folder.rglob("*.parquet")) == files
    for file in files:
        table = pq.read_table(file, columns=["reward", "reward_before"], partitioning=None).to_pydict()
        assert {value for value in table["reward"] if value is not None} == {0.0}
        assert {value for value in table["reward_before"] if value is not None} == {1.0}
    before = [file.read_bytes() for file in files]
    assert scored_again(deployed, FORM) == "success"
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize("changes", [{"last": ITERATIONS}, {"options": {"pattern": "another"}}])
def test_what_cannot_be_scored_fails_at_once(deployed: Deployment, changes: dict[str, Any]) -> None:
    """Iterations that are not done, and another reward under a name that is taken."""
    assert scored_again(deployed, FORM | changes) == "failed"
    with AirflowApi(deployed.record.url) as api:
        assert api.num_versions(RESCORE_DAG) == 1


def test_form_with_impossible_values_is_refused_before_anything_runs(deployed: Deployment) -> None:
    assert triggered(deployed, FORM | {"name": "../up"}).status_code == httpx.codes.BAD_REQUEST
    assert triggered(deployed, FORM | {"reward": "nonsense"}).status_code == httpx.codes.BAD_REQUEST
