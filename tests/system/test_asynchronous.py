"""Asynchronous runs through a real Airflow: overlap, the staleness bound, the end, and `kill -9` at any moment.

`MOTLEY_CRASH_SEED` chooses the moments; a campaign counts it up.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stages.contract import StageName, StageResult, StageStatus
from stages.staleness.buffer import RolloutBuffer
from storage.checkpoints import load_checkpoint
from storage.critics import resolve_critic
from storage.iterations import find_records
from storage.policies import head_version
from storage.sql import connect
from tests.system.deployed import Deployment, deployment, kill, needs_engines, outcome, trainings, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(3600),
    needs_engines,
]

SPECS = Path(__file__).parent / "specs"
ITERATIONS = 5
SEED = int(os.environ.get("MOTLEY_CRASH_SEED", "0"))
RUN = "tiny"
BATCH, SPARE = 16, 4
COMMAND_S = 3000.0
"""Longest command; a crowded machine is many times slower than an idle one."""


BEHIND_GENERATION = {
    "grpo": ["infer", "train"],
    "ppo": ["reward_inference", "reference_inference", "critic_inference", "train", "critic_training"],
}
"""Rows between generation and the commit."""
CASES = [(1, "grpo"), (2, "grpo"), (1, "ppo")]
"""Bounds of staleness, and algorithms."""


def start(folder: Path, bound: int, algorithm: str, *more: str) -> tuple[str, ...]:
    job, cluster = folder / "job.yaml", str(SPECS / "tiny_cluster.yaml")
    document = yaml.safe_load((SPECS / "tiny_async_job.yaml").read_text()) | {"max_staleness": bound}
    if algorithm == "ppo":
        grpo, models = document.pop("grpo"), document["models"]
        models["critic"] = {"shape": models["actor"]["shape"]}
        document |= {"algorithm": "ppo", "ppo": {name: grpo[name] for name in ("num_mini_batches", "num_epochs", "kl")}}
    job.write_text(yaml.safe_dump(document))
    return ("run", "--job", str(job), "--cluster", cluster, "--name", RUN, "--iterations", str(ITERATIONS), *more)


def check_run(found: Deployment, bound: int, algorithm: str) -> None:
    """Check what must hold however the run went: the data alone tells."""
    store = found.store
    if algorithm == "ppo":
        critics = [resolve_critic(store, RUN, version).weights_hash for version in range(ITERATIONS + 1)]
        assert len(set(critics)) == len(critics)
    assert head_version(store, RUN) == ITERATIONS
    assert [record.iteration for record in find_records(store, RUN)] == list(range(ITERATIONS))
    assert [trainings(found, k) for k in range(ITERATIONS)] == [1] * ITERATIONS
    with connect(store, RUN) as sql:
        groups = sql.sql(
            "SELECT iteration, prompt_index, count(*), count(DISTINCT row_id), min(policy_version_first), "
            "max(trained_policy_version), bool_or(dropped_reason = 'stale'), min(len(token_policy_versions) = "
            "len(completion_token_ids)) FROM completions WHERE split = 'train' GROUP BY 1, 2"
        ).fetchall()
    assert {(row[0], row[1]) for row in groups} == {(k, p) for k in range(ITERATIONS) for p in range(BATCH + SPARE)}
    assert {row[2:4] for row in groups} == {(4, 4)}
    assert all(row[7] for row in groups)
    trained = [row for row in groups if row[5] is not None and not row[6]]
    assert len(trained) == ITERATIONS * BATCH
    assert {row[5] - row[4] for row in trained} <= set(range(bound + 1))
    checkpoint = load_checkpoint(store, RUN, ITERATIONS)
    buffer = RolloutBuffer.from_json(checkpoint.manifest.metadata["buffer"], ITERATIONS)
    assert (buffer.num_made, buffer.num_trained) == (len(groups), len(trained))
    assert found.motley("verify", RUN, timeout_s=COMMAND_S).returncode == 0


def worked(found: Deployment, row: str, k: int) -> StageResult:
    results: list[Any] = [attempt.result() for attempt in found.attempts(row, k)]
    return next(r for r in results if isinstance(r, StageResult) and r.status is StageStatus.OK and not r.reused)


@pytest.mark.parametrize(("bound", "algorithm"), CASES)
def test_generation_runs_beside_training_within_the_bound_and_ends_with_the_last_iteration(
    bound: int, algorithm: str, tmp_path: Path
) -> None:
    with deployment(tmp_path / "home") as found:
        done = outcome(found.motley(*start(tmp_path, bound, algorithm, "--json"), timeout_s=COMMAND_S))
        assert (done["state"], done["policy_version"]) == ("finished", ITERATIONS)
        check_run(found, bound, algorithm)
        generated = {k: worked(found, StageName.GENERATE.value, k) for k in range(ITERATIONS)}
        trained = {k: worked(found, StageName.TRAIN.value, k) for k in range(ITERATIONS)}
        overlaps = [k for k in range(ITERATIONS - 1) if generated[k + 1].started_at < trained[k].ended_at]
        assert overlaps, "no iteration was sampled before the one before it was trained"
        for k in range(ITERATIONS - 1):
            assert trained[k].ended_at <= trained[k + 1].started_at


@pytest.mark.parametrize(("bound", "algorithm"), CASES)
def test_asynchronous_run_killed_and_resumed_loses_and_repeats_nothing(
    bound: int, algorithm: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng([SEED, bound])
    with deployment(tmp_path / "home") as found:
        assert found.motley(*start(tmp_path, bound, algorithm, "--detach"), timeout_s=COMMAND_S).returncode == 0
        row = str(rng.choice(["generate", *BEHIND_GENERATION[algorithm], "commit_policy", "sync"]))
        iteration = int(rng.integers(1, ITERATIONS - 1))
        until(lambda: found.attempts(row, iteration), f"{row} of iteration {iteration}", timeout_s=COMMAND_S)
        time.sleep(float(rng.uniform(0.0, 2.0)))
        assert kill(found.everything()) > 0
        done = found.motley("resume", RUN, "--json", timeout_s=COMMAND_S)
        assert done.returncode == 0, f"killed at {row} of iteration {iteration}: {done.stderr}"
        check_run(found, bound, algorithm)
