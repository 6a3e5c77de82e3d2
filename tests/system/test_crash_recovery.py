"""A run struck by `kill -9` in every way, again and again, equals one that was not: rows, weights and metrics.

`MOTLEY_CRASH_SEEDS` chooses order and moments of the strikes: "0" by default, "0-9" for a campaign of ten.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.deployed import Deployment, deployment, kill, needs_engines, outcome, snapshot, trainings, until
from tests.system.first_model import with_first_model

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(3600),
    needs_engines,
]

SPECS = Path(__file__).parent / "specs"
FIRST_SEED, _, LAST_SEED = os.environ.get("MOTLEY_CRASH_SEEDS", "0").partition("-")
SEEDS = range(int(FIRST_SEED), int(LAST_SEED or FIRST_SEED) + 1)
STAGES = ("generate", "infer", "train", "commit_policy", "weight_sync")
ROWS = {"weight_sync": "sync"}


def kill_stage_process(found: Deployment) -> int:
    """Kill the stage that is running, or the next one."""
    return until(lambda: kill(found.stage_processes()), "a stage process")


def kill_engine(found: Deployment) -> int:
    """Kill every engine, or the next one: after a dead deployment, none may run until a stage asks for it."""
    return until(lambda: kill(found.engines()), "an engine")


def kill_scheduler(found: Deployment) -> int:
    """Kill Airflow's scheduler and nothing else."""
    scheduler = next(c.pid for c in found.record.processes if c.name == "scheduler")
    return kill([p for p in found.everything() if p.pid == scheduler])


def kill_deployment(found: Deployment) -> int:
    """Kill all that runs."""
    return kill(found.everything())


# The deployment dies twice (known fault C11): the second resume starts from what the first one made.
STRIKES: tuple[Callable[[Deployment], int], ...] = (
    kill_stage_process,
    kill_engine,
    kill_scheduler,
    kill_deployment,
    kill_deployment,
)
ITERATIONS = len(STRIKES) + 2
"""One strike per iteration; the first and the last are left in peace."""


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


@contextmanager
def follower(found: Deployment, *command: str) -> Iterator[None]:
    """Have somebody run a command and look on until the block ends; what it says is kept beside the deployment."""
    with (found.home.path.parent / "followed.log").open("ab") as log:
        process = subprocess.Popen(found.command(*command), env=found.environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("seed", SEEDS)
def test_run_struck_in_every_way_and_resumed_equals_an_uninterrupted_one(
    seed: int, start: tuple[str, ...], uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng([seed, 1])
    strikes = []
    with deployment(tmp_path / "home") as found:
        command = start
        for iteration, index in enumerate(rng.permutation(len(STRIKES)), start=1):
            with follower(found, *command):
                moment = wait_for_moment(found, rng, iteration)
                strikes.append(f"{STRIKES[index].__name__} at {moment}")
                assert STRIKES[index](found) > 0, strikes
            command = ("resume", "tiny")
        done = found.motley("resume", "tiny", "--json")
        assert done.returncode == 0, f"after {strikes}: {done.stderr}"
        assert outcome(done)["state"] == "finished"
        assert snapshot(found.store, "tiny", ITERATIONS) == uninterrupted, strikes
        assert [trainings(found, k) for k in range(ITERATIONS)] == [1] * ITERATIONS, strikes
        assert found.motley("verify", "tiny").returncode == 0, strikes
