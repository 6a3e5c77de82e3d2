"""The example `two-regions` through a real Airflow: what crosses the link, and what stays where it was made.

Two regions with a network, an S3 server, a home and an Edge worker each; one run, looked at when all is down again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.deployment_record import read_record
from scripts.regions.airflow import AIRFLOW_JOURNAL
from scripts.regions.crossings import rollout_facts, rows_in, store_of, traffic, weight_facts
from scripts.regions.example import EXAMPLES, Finished, finished_run
from scripts.regions.layout import home_of
from stages.home import MotleyHome
from stages.spec.job import TrainingJob, load_training_job
from storage.policies import DELTA_PART, head_version, resolve_policy
from storage.regional_view import view_of
from storage.rollouts import read_rollouts
from tests.system.deployed import needs_engines
from tests.system.regional import assert_nothing_runs

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(7200),
    needs_engines,
]


RUN = "two-regions"


@dataclass(frozen=True, slots=True)
class Run:
    """The run that was made, and what is read from its buckets and journals."""

    folder: Path
    finished: Finished
    job: TrainingJob
    weights: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]

    @property
    def iterations(self) -> int:
        return self.job.iterations


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    folder = tmp_path_factory.mktemp("regions")
    job = load_training_job((EXAMPLES / RUN / "job.yaml").read_text(), "job.yaml")
    with finished_run(folder, RUN) as finished:
        pass
    weights = weight_facts(finished.layout, RUN, job.iterations)
    return Run(folder, finished, job, weights, rollout_facts(finished.layout, RUN, job.iterations))


def test_run_ends_and_is_whole_over_both_stores(run: Run) -> None:
    assert (run.finished.outcome["state"], run.finished.outcome["policy_version"]) == ("finished", run.iterations)
    assert head_version(store_of(run.finished.layout.home), RUN) == run.iterations
    assert run.finished.verified["is_good"]
    assert run.finished.verified["stores"] == [region.root for region in run.finished.layout.regions]
    stores = view_of([store_of(region) for region in run.finished.layout.regions])
    for k in range(run.iterations):
        rows = read_rollouts(stores, RUN, k, columns=["row_id", "reward", "advantage"], families=["reward", "training"])
        assert rows.num_rows == run.job.planner.num_samples


def test_every_version_crosses_the_link_once_and_later_ones_as_deltas(run: Run) -> None:
    assert [(fact["region"], fact["version"]) for fact in run.weights] == [
        ("east", version) for version in range(run.iterations + 1)
    ]
    first, *later = run.weights
    # Exactly its size, so neither twice nor in part; nothing else has it.
    assert first["crossed_bytes"] == first["bytes"]
    for fact in later:
        weights = {name: size for name, size in fact["bytes"].items() if name.endswith(".safetensors")}
        assert fact["crossed_bytes"][DELTA_PART] == fact["bytes"][DELTA_PART]
        assert fact["crossed_bytes"].keys().isdisjoint(weights)
        assert fact["bytes"][DELTA_PART] < sum(weights.values()) / 2
    assert [fact["form_in_region"] for fact in run.weights] == [None, "whole", *["delta"] * (run.iterations - 1)]


def test_rows_lie_where_they_were_made_and_the_trainer_reads_the_others_over_the_link(run: Run) -> None:
    half = run.job.planner.num_samples // 2
    made = {(fact["region"], fact["iteration"]): fact["rows_by_maker"] for fact in run.rollouts}
    assert made == {(name, k): {name: half} for name in ("west", "east") for k in range(run.iterations)}
    for fact in run.rollouts:
        # The west trains, so it alone needs rows of the other region.
        assert (fact["bytes_read_elsewhere"] > 0) is (fact["region"] == "west")


def test_rows_of_both_regions_came_from_the_version_of_their_iteration(run: Run) -> None:
    home = store_of(run.finished.layout.home)
    columns = ["policy_version_first", "policy_version_last", "weights_hash"]
    for region in run.finished.layout.regions:
        for k in range(run.iterations):
            rows = rows_in(store_of(region), RUN, k, columns)
            wanted = (k, k, resolve_policy(home, RUN, k).weights_hash)
            assert {tuple(row[name] for name in columns) for row in rows} == {wanted}


def test_the_other_region_reaches_airflow_over_the_link_alone(run: Run) -> None:
    layout = run.finished.layout
    assert sum(one.num_requests for one in traffic(layout.region("east").folder / AIRFLOW_JOURNAL).values()) > 0
    assert read_record(MotleyHome(home_of(layout.region("east"))).deployment_file) is None


def test_nothing_runs_afterwards(run: Run) -> None:
    assert_nothing_runs(run.finished.layout, run.folder)


def test_no_file_holds_a_credential_of_a_store(run: Run) -> None:
    secrets = [region.secret.encode() for region in run.finished.layout.regions]
    files = [path for path in run.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 100
    assert [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)] == []
