"""Iterations by hand through the real engines: retries, shard counts and restarts change nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from stages.engines.manager import EngineManager
from storage.layout import manifest_key, shard_folder
from storage.policies import head_version, resolve_policy
from storage.rollout_schema import Family, sample_seed
from storage.rollouts import read_rollouts, shard_manifests
from storage.runs import read_iteration
from tests.helpers.hand_run import ITERATION, HandRun, tiny_run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandRun]:
    """Three iterations without interruption, two prompt groups per shard."""
    run = tiny_run(tmp_path_factory.mktemp("a"), samples_per_shard=8)
    try:
        for k in range(3):
            run.iteration(k)
        yield run
    finally:
        run.stop_engines()


def test_iterations_by_hand_commit_every_artefact(finished: HandRun) -> None:
    store, name = finished.store, finished.name

    assert head_version(store, name) == 3
    hashes = [resolve_policy(store, name, version).weights_hash for version in (0, 1, 2, 3)]
    assert len(set(hashes)) == 4  # every iteration learned something
    for k in range(3):
        families = (Family.REWARD, Family.REFERENCE, Family.TRAINING)
        rows = read_rollouts(store, name, k, families=families).to_pylist()
        assert len(rows) == 16
        assert {row["policy_version_first"] for row in rows} == {k}
        assert {row["weights_hash"] for row in rows} == {hashes[k]}
        assert {row["staleness"] for row in rows} == {0}
        # Version 0 is sampler and reference at once; sampler and trainer agree in fp32 at every version.
        assert max(row["logprob_gap_max"] or 0.0 for row in rows) < 1e-4
        record = read_iteration(store, name, k)
        assert (record.plan, record.policy_version_start, record.policy_version_end) == (0, k, k + 1)
        assert record.counts["rows"] == 16
        assert record.metadata["missing"] == []
        assert set(ITERATION[:-1]) <= record.measured_s.keys()
        assert record.metrics["overhead_fraction"] is not None
    evaluated = [k for k in range(4) if _has_evaluation(finished, k)]
    assert evaluated == [0, 2, 3]  # before the run, every second one, the last one
    assert read_iteration(store, name, 0).metrics["eval_reward_mean_before"] is not None


def test_row_seeds_follow_from_identity(finished: HandRun) -> None:
    """S1: no two samples share a seed, whatever engine made them."""
    rows = read_rollouts(finished.store, finished.name, 1).to_pylist()

    expected = [sample_seed(5, 1, row["prompt_id"], row["sample_index"]) for row in rows]
    assert [row["seed"] for row in rows] == expected
    assert len(set(expected)) == 16


def test_every_stage_repeated_is_reused(finished: HandRun) -> None:
    """P6, C22: a second attempt finds what the first one committed, also for iterations that later ones built on."""
    before = {version: resolve_policy(finished.store, finished.name, version).manifest for version in (2, 3)}

    repeated = {**finished.iteration(2), "generate of 1": finished.stage("generate", 1)}
    repeated |= {"train of 1": finished.stage("train", 1), "prepare": finished.stage("prepare", 0)}

    assert {name: result.reused for name, result in repeated.items()} == dict.fromkeys(repeated, True)
    assert {version: resolve_policy(finished.store, finished.name, version).manifest for version in (2, 3)} == before


def test_retry_makes_missing_shards_only(finished: HandRun) -> None:
    store, name = finished.store, finished.name
    before = shard_manifests(store, name, 2)
    store.delete(manifest_key(shard_folder(name, 2, "rollouts", 1)))

    result = finished.stage("generate", 2)

    after = shard_manifests(store, name, 2)
    assert (result.reused, result.metrics["num_shards"], result.metrics["num_reused_shards"]) == (False, 2, 1)
    assert after[0] == before[0]
    assert after[1].attempt != before[1].attempt
    assert after[1].content_digest == before[1].content_digest


def test_killed_engine_is_replaced_and_samples_the_same_tokens(finished: HandRun) -> None:
    store, name = finished.store, finished.name
    before = shard_manifests(store, name, 2)
    store.delete(manifest_key(shard_folder(name, 2, "rollouts", 0)))
    (engine,) = (r for r in EngineManager(finished.state_dir()).list() if r.launch.role == "generation")
    os.kill(engine.pid, signal.SIGKILL)

    result = finished.stage("generate", 2)

    assert result.metrics["num_reused_shards"] == 1
    assert shard_manifests(store, name, 2)[0].content_digest == before[0].content_digest


def test_request_for_an_unknown_region_is_refused(finished: HandRun) -> None:
    result = finished.stage("weight_sync", 2, 2, region="nowhere")

    assert result.error is not None
    assert (result.error.type, result.error.is_retryable) == ("stages.errors.ContractError", False)
    assert "params.region is 'nowhere', but it is one of here" in result.error.message


def test_other_shards_and_a_restart_give_the_same_run(
    finished: HandRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """C7, C23: one prompt group per shard, all engines ended before the last iteration: same rows, same policies."""
    other = tiny_run(tmp_path_factory.mktemp("b"), samples_per_shard=4)
    try:
        for k in range(2):
            other.iteration(k)
        assert other.stop_engines() == 3
        other.iteration(2)
    finally:
        other.stop_engines()

    columns = ("row_id", "completion_token_ids", "sampler_logprobs", "seed")
    for k in range(3):
        assert len(shard_manifests(other.store, other.name, k)) == 4
        theirs = read_rollouts(other.store, other.name, k, columns=columns).to_pylist()
        ours = read_rollouts(finished.store, finished.name, k, columns=columns).to_pylist()
        assert [row["row_id"] for row in theirs] == [row["row_id"] for row in ours]
        assert [row["completion_token_ids"] for row in theirs] == [row["completion_token_ids"] for row in ours]
    for version in range(4):
        theirs_hash = resolve_policy(other.store, other.name, version).weights_hash
        assert theirs_hash == resolve_policy(finished.store, finished.name, version).weights_hash


def _has_evaluation(run: HandRun, version: int) -> bool:
    return run.store.exists(manifest_key(shard_folder(run.name, version, "reward", 0, "eval")))
