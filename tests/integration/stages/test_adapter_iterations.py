"""A run that trains adapters: small versions, crashes, restarts, the proofs.

Marked `slow`: some thirty stages, each in a process of its own, and engines that start three times.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storage.adapter_policies import base_of
from storage.layout import Split, manifest_key, policy_folder, shard_folder
from storage.policies import head_version, resolve_policy
from storage.policy_fetch import local_policy_folder
from storage.rollout_schema import Family
from storage.rollouts import read_rollouts
from storage.verify import Severity, verify_run
from tests.helpers.hand_run import HandRun, tiny_run

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3000)]

LORA = "engines: {training: {name: accelerate, lora: {rank: 2, alpha: 4, target_modules: [q_proj, v_proj]}}}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandRun]:
    """Two iterations without interruption."""
    run = tiny_run(tmp_path_factory.mktemp("lora"), samples_per_shard=16, changes=LORA)
    try:
        for k in range(2):
            run.iteration(k)
        yield run
    finally:
        run.stop_engines()


def test_versions_are_adapters_that_learn_and_engines_compute_with_them(finished: HandRun) -> None:
    store, name = finished.store, finished.name
    assert head_version(store, name) == 2
    base, *adapters = (resolve_policy(store, name, version) for version in range(3))
    assert base.adapter is None
    for policy in adapters:
        assert base_of(store, policy) == base
        assert {part.name for part in policy.manifest.parts} == {"adapter_model.safetensors", "adapter_config.json"}
    tensors = [policy.manifest.metadata["adapter"]["tensors"] for policy in adapters]
    assert len(tensors[0]) == 2 * 2 * 2  # A and B of two layers' q and v
    assert all(tensors[0][tensor] != tensors[1][tensor] for tensor in tensors[0])
    for k in range(2):
        rows = read_rollouts(store, name, k, families=(Family.REFERENCE, Family.TRAINING)).to_pylist()
        assert {row["weights_hash"] for row in rows} == {[base, *adapters][k].weights_hash}
        assert {row["reference_weights_hash"] for row in rows} == {base.weights_hash}
        # What sampled with an adapter beside its layers, and what trained it, agree as whole weights do.
        assert max(row["logprob_gap_max"] or 0.0 for row in rows) < 1e-4
    assert [finding for finding in verify_run(store, name).findings if finding.severity is Severity.ERROR] == []


def test_bytes_of_a_version_are_the_adapters(finished: HandRun) -> None:
    """5 KB of 92 KB here: the share falls with the width of the model (docs/experiments/LOG.md)."""
    store, name = finished.store, finished.name
    whole, adapter = (resolve_policy(store, name, version).manifest.size for version in (0, 2))
    assert adapter < whole / 10


def test_training_again_after_a_crash_makes_the_same_adapter(finished: HandRun) -> None:
    """Killed between the resume point and the policy, and again between the policy and its commit; engines gone."""
    store, name = finished.store, finished.name
    for stage in ("plan", "generate", "infer", "train"):
        finished.stage(stage, 2)
    first = resolve_policy(store, name, 3)
    finished.stop_engines()
    store.delete(manifest_key(policy_folder(name, 3)))

    assert not finished.stage("train", 2).reused
    again = resolve_policy(store, name, 3)
    assert again.weights_hash == first.weights_hash  # moments and adapters of version 2 were taken up bit for bit
    assert head_version(store, name) == 2
    assert finished.stage("train", 2).reused
    assert not finished.stage("commit_policy", 2).reused
    assert head_version(store, name) == 3
    finished.stage("weight_sync", 2, region="here")
    for stage in ("evaluate", "report"):
        finished.stage(stage, 2)


def test_a_torn_adapter_reaches_no_engine(finished: HandRun) -> None:
    """Runs last: it damages the newest version."""
    store, name = finished.store, finished.name
    folder = local_policy_folder(store, resolve_policy(store, name))
    assert folder is not None
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    finished.stop_engines()
    weights.write_bytes(whole[:-4] + b"\x00\x00\x80\x3f")
    result = finished.stage("weight_sync", 2, region="here")
    assert result.metrics["engines"] == 0  # none runs, so none is loaded
    store.delete(manifest_key(shard_folder(name, 3, Family.ROLLOUTS.value, 0, Split.EVAL)))
    result = finished.stage("evaluate", 2, 1)
    assert result.error is not None
    assert "tensors differ" in result.error.message
    weights.write_bytes(whole)
