"""A run that was interrupted by `kill -9` and resumed equals one that was not: rows, weights and metrics.

`MOTLEY_CRASH_SEEDS` chooses the moments: "0" by default, "0-9" for a campaign of ten passes in a row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.home import ENGINES_PYTHON_VARIABLE
from tests.system.deployed import Deployment, deployment, kill, outcome, snapshot, trainings, until
from tests.system.first_model import with_first_model

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(ENGINES_PYTHON_VARIABLE not in os.environ, reason="needs MOTLEY_ENGINES_PYTHON"),
]

SPECS = Path(__file__).parent / "specs"
ITERATIONS = 4
FIRST_SEED, _, LAST_SEED = os.environ.get("MOTLEY_CRASH_SEEDS", "0").partition("-")
SEEDS = range(int(FIRST_SEED), int(LAST_SEED or FIRST_SEED) + 1)
STAGES = ("generate", "infer", "train", "commit_policy", "weight_sync")
ROWS = {"weight_sync": "sync"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Give the command that starts the run."""
    job = with_first_model(SPECS / "tiny_job.yaml", tmp_path_factory.mktemp("first") / "model")
    cluster = SPECS / "tiny_cluster.yaml"
    return ("run", "--job", str(job), "--cluster", str(cluster), "--name", "tiny", "--iterations", str(ITERATIONS))


@pytest.fixture(scope="module")
def uninterrupted(start: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give the snapshot of a run that nothing disturbed."""
    with deployment(tmp_path_factory.mktemp("uninterrupted")) as found:
        assert outcome(found.motley(*start, "--json"))["state"] == "finished"
        return snapshot(found.store, "tiny", ITERATIONS)


def wait_for_moment(found: Deployment, rng: np.random.Generator, iteration: int) -> str:
    """Wait until a random moment of a random stage of an iteration."""
    stage = str(rng.choice(STAGES))
    row = ROWS.get(stage, stage)
    until(lambda: found.attempts(row, iteration), f"{stage} of iteration {iteration}")
    time.sleep(float(rng.uniform(0.0, 1.5)))
    return f"{stage} of iteration {iteration}"


def kill_stage_process(found: Deployment) -> int:
    return until(lambda: kill(found.stage_processes()), "a stage process")


def kill_engine(found: Deployment) -> int:
    return kill(found.engines())


def kill_scheduler(found: Deployment) -> int:
    scheduler = next(c.pid for c in found.record.processes if c.name == "scheduler")
    return kill([p for p in found.everything() if p.pid == scheduler])


def kill_deployment(found: Deployment) -> int:
    return kill(found.everything())


@pytest.mark.parametrize("strike", [kill_deployment, kill_scheduler, kill_stage_process, kill_engine])
@pytest.mark.parametrize("seed", SEEDS)
def test_run_killed_and_resumed_equals_an_uninterrupted_one(
    strike: Callable[[Deployment], int],
    seed: int,
    start: tuple[str, ...],
    uninterrupted: dict[str, Any],
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng([seed, *strike.__name__.encode()])
    with deployment(tmp_path / "home") as found:
        assert found.motley(*start, "--detach").returncode == 0
        moment = wait_for_moment(found, rng, iteration=int(rng.integers(1, ITERATIONS - 1)))
        assert strike(found) > 0, moment
        done = found.motley("resume", "tiny", "--json")
        assert done.returncode == 0, f"after {strike.__name__} at {moment}: {done.stderr}"
        assert snapshot(found.store, "tiny", ITERATIONS) == uninterrupted, moment
        assert [trainings(found, k) for k in range(ITERATIONS)] == [1] * ITERATIONS, moment
        assert found.motley("verify", "tiny").returncode == 0, moment


@pytest.mark.parametrize("seed", SEEDS)
def test_run_killed_twice_and_resumed_twice_equals_an_uninterrupted_one(
    seed: int, start: tuple[str, ...], uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    """C11: the second resume starts from what the first one made."""
    rng = np.random.default_rng([seed, 2])
    with deployment(tmp_path / "home") as found:
        assert found.motley(*start, "--detach").returncode == 0
        moments = []
        for iteration in (1, 2):
            moments.append(wait_for_moment(found, rng, iteration))
            assert kill_deployment(found) > 0
            resumed = found.motley("up")
            assert resumed.returncode == 0, resumed.stderr
        done = found.motley("resume", "tiny", "--json")
        assert done.returncode == 0, f"after {moments}: {done.stderr}"
        assert outcome(found.motley("resume", "tiny", "--json"))["state"] == "finished"
        assert snapshot(found.store, "tiny", ITERATIONS) == uninterrupted, moments
        assert [trainings(found, k) for k in range(ITERATIONS)] == [1] * ITERATIONS, moments
