"""Every example that can be run is a valid job on a valid cluster, and the README names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans.spec.load import load_cluster
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
