"""`motley calibrate` on a run whose times were made by the model under other coefficients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plans.cost import CostModel, load_calibration, price
from plans.cost.calibration import Calibration, ComputeEfficiency, GpuEfficiency
from plans.workflow import RlTask
from stages.plan_history import numbered_plan
from storage.runs import IterationRecord, write_iteration
from tests.helpers.stage_contexts import make_context, make_run
from tests.helpers.storage_builders import NOW

TRUTH = Calibration(gpu_types={"cpu": GpuEfficiency(compute=ComputeEfficiency(generation=0.2, training=0.1), hbm=0.3)})


def motley(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MOTLEY_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "cli", "calibrate", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of run `r`: three iterations, of which the first took ten times as long as the model says."""
    base = tmp_path_factory.mktemp("run")
    run = make_run(base)
    context = make_context(run, base, "plan", 0)
    plan = numbered_plan(context.home, "r", 0).plan
    tasks = price(run.cluster, run.job.planner, plan, CostModel.calibrated(TRUTH)).tasks
    generation, training = tasks[RlTask.ACTOR_GENERATION], tasks[RlTask.ACTOR_TRAINING]
    assert generation is not None
    assert training is not None
    for iteration in range(3):
        slower = 10.0 if iteration == 0 else 1.0
        phases = {
            "generate": {"generate": generation.total_s * slower, "engines": 50.0},
            "train": {"train": training.total_s * slower, "read": 7.0},
        }
        record = IterationRecord(
            run="r", iteration=iteration, plan=0, policy_version_start=iteration, policy_version_end=iteration + 1,
            started_at=NOW, ended_at=NOW, metadata={"phases_s": phases},
        )  # fmt: skip
        write_iteration(context.home, record)
    return Path(context.home.url.removeprefix("file://"))


def test_model_explains_the_work_of_the_engines_after_the_first_iteration(root: Path, tmp_path: Path) -> None:
    done = motley(tmp_path, f"{root}/r", "--json", "--out", str(tmp_path / "c.json"))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {row["task"]: row for row in document["tasks"]}
    assert set(rows) == {"actor_generation", "actor_training"}
    for row in rows.values():
        assert row["iterations"] == 2
        assert row["fitted_s"] == pytest.approx(row["measured_s"], rel=0.02)
        assert row["built_in_s"] < 0.8 * row["measured_s"]
    written = load_calibration((tmp_path / "c.json").read_text(), "c.json")
    assert written.model_dump() == document["calibration"]
    assert written.of("cpu").compute.training == pytest.approx(0.1, rel=0.05)


def test_text_shows_seconds_and_what_to_do_with_the_file(root: Path, tmp_path: Path) -> None:
    done = motley(tmp_path, f"{root}/r", "--out", str(tmp_path / "c.json"))
    assert done.returncode == 0, done.stderr
    assert "actor_training" in done.stdout
    assert f"--calibration {tmp_path / 'c.json'}" in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--skip", "3"), 1, "has no measured time behind its first 3 iteration(s)"),
        (("--skip", "-1"), 2, "Invalid value for '--skip'"),
        (("--out", "/nowhere/c.json"), 2, "/nowhere/c.json can't be written"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    root: Path, tmp_path: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    done = motley(tmp_path, f"{root}/r", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
