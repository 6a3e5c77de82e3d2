"""Every example that can be run is a valid job on a valid cluster, and the README names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans.plan import check_plan
from plans.plan_load import load_plan
from plans.spec.load import load_cluster
from stages.engine_limits import engine_limits
from stages.spec.job import load_training_job

ROOT = Path(__file__).parents[2]
RUNNABLE = sorted(path.parent for path in (ROOT / "examples").glob("*/job.yaml"))


def test_there_are_runnable_examples() -> None:
    assert {folder.name for folder in RUNNABLE} >= {"quickstart", "smollm2-gsm"}


@pytest.mark.parametrize("folder", RUNNABLE, ids=lambda folder: folder.name)
def test_example_is_a_valid_job_on_a_valid_cluster(folder: Path) -> None:
    job = load_training_job((folder / "job.yaml").read_text(), "job.yaml")
    cluster = load_cluster((folder / "cluster.yaml").read_text(), "cluster.yaml")
    assert job.iterations >= 1
    assert cluster.view.num_gpus >= 1
    assert f"examples/{folder.name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*/plan.yaml")), ids=lambda file: file.parent.name)
def test_plan_beside_an_example_is_one_of_its_job_and_cluster(file: Path) -> None:
    job = load_training_job((file.parent / "job.yaml").read_text(), "job.yaml")
    cluster = load_cluster((file.parent / "cluster.yaml").read_text(), "cluster.yaml")
    plan = load_plan(file.read_text(), "plan.yaml")
    check_plan(plan, cluster, job.planner)
    assert engine_limits(job, cluster).faults(plan, cluster.view) == []
