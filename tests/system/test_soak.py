"""Campaign: a long run of the tiniest job with random kills of every component equals an uninterrupted one.

Marked `slow`: `pytest -m "system and slow" tests/system/test_soak.py`. `MOTLEY_SOAK_ITERATIONS` (default 200) and
`MOTLEY_SOAK_SEED` (default 0) choose length and moments; a reduced run of 12 iterations takes minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from cli.deployment_api import AirflowApi
from stages.home import dag_id_of
from storage.policies import head_version
from tests.system.deployed import Deployment, deployment, kill, needs_engines, outcome, snapshot

ITERATIONS = int(os.environ.get("MOTLEY_SOAK_ITERATIONS", "200"))
SEED = int(os.environ.get("MOTLEY_SOAK_SEED", "0"))
KILL_EVERY = 4
"""Iterations between two kills, in the mean."""
CHECK_EVERY_S = 0.5
SPECS = Path(__file__).parent / "specs"

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(120 * ITERATIONS + 1800),
    needs_engines,
]

START = (
    "run", "--job", str(SPECS / "tiny_job.yaml"), "--cluster", str(SPECS / "tiny_cluster.yaml"), "--name", "tiny",
    "--iterations", str(ITERATIONS),
)  # fmt: skip


def components(found: Deployment) -> dict[str, Callable[[], list[psutil.Process]]]:
    """Return what can be struck, by name."""

    def named(name: str) -> list[psutil.Process]:
        pids = {component.pid for component in found.record.processes if component.name == name}
        return [process for process in found.everything() if process.pid in pids]

    return {
        "stage process": found.stage_processes,
        "engines": found.engines,
        "scheduler": lambda: named("scheduler"),
        "dag-processor": lambda: named("dag-processor"),
        "triggerer": lambda: named("triggerer"),
        "api-server": lambda: named("api-server"),
        "everything": found.everything,
    }


def resident_bytes(found: Deployment) -> int:
    """Return the memory of Airflow's own processes."""
    total = 0
    for component in found.record.processes:
        try:
            total += psutil.Process(component.pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def state_bytes(found: Deployment) -> int:
    """Return the bytes of job folders, caches and work files (the store grows by design)."""
    return sum(file.stat().st_size for file in (found.home.path / "state").rglob("*") if file.is_file())


def redo_failed(found: Deployment) -> None:
    """Retry what a kill left failed for good; a running iteration is left to Airflow."""
    with AirflowApi(found.record.url) as api:
        failed = api.dag_runs(dag_id_of("tiny"), states=("failed",))
    if failed:
        done = found.motley("resume", "tiny", timeout_s=120.0 * ITERATIONS + 1800)
        assert done.returncode == 0, done.stderr


def strike_until_done(found: Deployment, rng: np.random.Generator) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Kill components at random until the last version is committed; return the kills and (version, memory, disk)."""
    kills: list[str] = []
    sizes: list[tuple[int, int, int]] = []
    next_kill = 1
    while (head := head_version(found.store, "tiny") or 0) < ITERATIONS:
        if head and (not sizes or head >= sizes[-1][0] + max(1, ITERATIONS // 10)):
            sizes.append((head, resident_bytes(found), state_bytes(found)))
        if head < next_kill:
            time.sleep(CHECK_EVERY_S)
            continue
        time.sleep(float(rng.uniform(0.0, 3.0)))
        what = str(rng.choice(list(components(found))))
        if kill(components(found)[what]()):
            kills.append(f"{what} at version {head}")
        next_kill = head + 1 + int(rng.integers(0, 2 * KILL_EVERY))
        if what not in ("stage process", "engines"):
            assert found.motley("up").returncode == 0, kills
            redo_failed(found)
    return kills, sizes


def test_long_run_with_random_kills_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with deployment(tmp_path / "calm") as calm:
        assert outcome(calm.motley(*START, "--json", timeout_s=120.0 * ITERATIONS))["state"] == "finished"
        expected = snapshot(calm.store, "tiny", ITERATIONS)
    with deployment(tmp_path / "struck") as found:
        assert found.motley(*START, "--detach").returncode == 0
        kills, sizes = strike_until_done(found, np.random.default_rng(SEED))
        assert kills
        done = found.motley("resume", "tiny", "--json", timeout_s=120.0 * ITERATIONS)
        assert outcome(done)["policy_version"] == ITERATIONS, kills
        assert snapshot(found.store, "tiny", ITERATIONS) == expected, kills
        with AirflowApi(found.record.url) as api:
            assert api.num_versions(dag_id_of("tiny")) == 1
        assert found.motley("verify", "tiny").returncode == 0, kills
        # Flat: the last third no bigger than the first by more than a half, job folders by no more than they grew.
        (_, memory, _), (_, last_memory, _) = sizes[0], sizes[-1]
        assert last_memory < 1.5 * memory, sizes
