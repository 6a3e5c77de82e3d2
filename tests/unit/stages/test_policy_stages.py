"""commit_policy, weight_sync and the choice of policies, on real stores and without engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from stages import commit_policy, evaluate, prepare, replicate, train, weight_sync
from stages.context import StageContext
from stages.errors import ContractError, StaleRolloutError
from stages.policy_files import files_of, policy_directory
from stages.sampling import policy_for
from stages.shard_writer import RolloutBatch
from storage.errors import CorruptObjectError, ObjectMissingError, ResumeMismatchError
from storage.layout import Split, checkpoint_folder, manifest_key
from storage.leases import live_leases
from storage.policies import LocalPolicy, head_version, publish_policy, resolve_policy
from storage.policy_copies import publish_copy
from storage.policy_fetch import local_policy_folder
from storage.rollouts import read_rollouts, write_rollouts
from storage.store import open_store
from storage.weights_hash import weights_hash
from tests.helpers.stage_contexts import make_context, make_run, publish
from tests.helpers.storage_builders import NOW, rollout_rows


def test_commit_advances_the_head_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, is_head=True)
    policy = publish(context, 1)
    assert head_version(context.home, "r") == 0  # published is not yet authoritative

    first, second = commit_policy.run_stage(context), commit_policy.run_stage(context)

    assert head_version(context.home, "r") == 1
    assert (first.reused, first.metrics["weights_hash"], second.reused) == (False, policy.weights_hash, True)


def test_commit_refuses_a_policy_whose_bytes_have_changed(tmp_path: Path) -> None:
    """C1, C2: a manifest alone proves nothing; every part is read and hashed before the head moves."""
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, is_head=True)
    part = publish(context, 1).manifest.part("model.safetensors")
    path = context.home.local_path(part.path)
    assert path is not None
    path.write_bytes(bytes(part.size))

    with pytest.raises(CorruptObjectError, match="policy version 1 is not published, or its files differ"):
        commit_policy.run_stage(context)
    assert head_version(context.home, "r") == 0


def test_commit_needs_the_resume_point(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, is_head=True)
    publish(context, 1)
    context.home.delete(manifest_key(checkpoint_folder("r", 1)))

    with pytest.raises(ObjectMissingError, match="trainer/1"):
        commit_policy.run_stage(context)
    assert head_version(context.home, "r") == 0


def test_commit_refuses_a_resume_point_of_another_job(tmp_path: Path) -> None:
    """C14."""
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, is_head=True)
    publish(context, 1)
    other = run.job.model_copy(update={"seed": 99})
    object.__setattr__(run, "job", type(run.job)(**{name: getattr(other, name) for name in type(other).model_fields}))

    with pytest.raises(ResumeMismatchError, match="configuration hash"):
        commit_policy.run_stage(context)


def test_commit_out_of_order_is_refused(tmp_path: Path) -> None:
    """T9."""
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "commit_policy", 2)
    publish(context, 0, is_head=True)

    with pytest.raises(ContractError, match="version 3 follows 2, but the newest committed version is 0"):
        commit_policy.run_stage(context)


def test_weight_sync_copies_once_per_region_and_keeps_the_hash(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    home = make_context(run, tmp_path, "weight_sync", 0)
    publish(home, 0, is_head=True)
    policy = publish(home, 1, is_head=True)
    context = make_context(run, tmp_path, "weight_sync", 0, "b0", region="b")

    first, second = weight_sync.run_stage(context), weight_sync.run_stage(context)

    copy = resolve_policy(open_store(run.roots["b"]), "r", 1)
    assert (copy.weights_hash, copy.manifest.content_digest) == (policy.weights_hash, policy.manifest.content_digest)
    assert copy.manifest.metadata["training"] == {"counts": {}}
    assert (first.reused, first.metrics["bytes"]) == (False, policy.manifest.size)
    assert (second.reused, second.metrics["bytes"]) == (True, 0)


def test_weight_sync_waits_for_the_commit(tmp_path: Path) -> None:
    """T6: nothing ships before the version is published and authoritative."""
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "weight_sync", 0, region="a")
    publish(context, 0, is_head=True)
    publish(context, 1)

    with pytest.raises(ContractError, match="version 1 is synced into a, but the newest committed version is 0"):
        weight_sync.run_stage(context)


def batch_of(iteration: int, oldest: int) -> RolloutBatch:
    return RolloutBatch(
        split=Split.TRAIN, number=iteration, prompts=(), samples_per_prompt=2, temperature=1.0,
        oldest_version=oldest, newest_version=iteration,
    )  # fmt: skip


def test_sampling_uses_the_iterations_own_version_also_when_repeated_later(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "generate", 1)
    publish(context, 0, is_head=True)
    with pytest.raises(
        StaleRolloutError, match="sampled from policy version 1 or later, but the newest committed one is 0"
    ):
        policy_for(context, batch_of(1, 1))

    for version in (1, 2, 3):
        publish(context, version, is_head=True)

    assert policy_for(context, batch_of(1, 1)).version == 1


def test_asynchronous_sampling_takes_the_newest_version_within_its_bounds(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "generate", 3)
    publish(context, 0, is_head=True)
    used = []
    for version in (1, 2, 3, 4):
        publish(context, version, is_head=True)
        used.append(policy_for(context, batch_of(3, 1)).version)

    assert used == [1, 2, 3, 3]


def test_training_is_serial(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    publish(make_context(run, tmp_path, "train", 0), 0, is_head=True)

    with pytest.raises(
        ContractError, match="iteration 1 trains policy version 1, but the newest committed version is 0"
    ):
        train.policy_to_train(make_context(run, tmp_path, "train", 1))


def test_committed_iteration_is_not_trained_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "train", 0)
    publish(context, 0, is_head=True)
    publish(context, 1, is_head=True)

    outcome = train.run_stage(context)

    assert (outcome.reused, outcome.metrics) == (True, {"counts": {}})


def test_unfinished_training_is_unpublished_before_it_is_repeated(tmp_path: Path) -> None:
    """A process that died between resume point and policy leaves nothing that a retry would trip over."""
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "train", 0)
    publish(context, 0, is_head=True)
    publish(context, 1)

    train._discard_unfinished(context, 1)

    assert not context.home.exists(manifest_key(checkpoint_folder("r", 1)))
    publish(context, 1)  # other bytes would be welcome too


@pytest.mark.parametrize(("every", "due"), [(0, [4]), (2, [1, 3, 4]), (1, [0, 1, 2, 3, 4]), (9, [4])])
def test_evaluation_is_due_every_nth_and_at_the_end(every: int, due: list[int]) -> None:
    """C17, C22: the last policy is always evaluated, each due one exactly once."""
    assert [k for k in range(5) if evaluate.is_due(k, 5, every)] == due


def test_prepare_has_nothing_to_do_later(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "prepare", 3)
    publish(context, 0, is_head=True)

    assert prepare.run_stage(context).reused


def test_request_names_a_machine_of_the_cluster(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "plan", 0)
    context.request = context.request.model_copy(update={"machine": "zz"})

    with pytest.raises(ContractError, match="machine is 'zz', but the cluster has a0, b0"):
        _ = context.machine


def _publish_chain(context: StageContext, versions: int) -> None:
    """Publish versions whose weights change in one element of a thousand, each with a delta from the one before."""
    values = np.arange(1000, dtype=np.float32)
    base = None
    for version in range(versions):
        values[version] += 1
        files = {"model.safetensors": save({"w": values}), "config.json": b"{}"}
        policy = publish_policy(context.home, "r", version, files, created_by="t", base=base)
        folder = local_policy_folder(context.home, policy)
        assert folder is not None
        base = LocalPolicy(policy, folder)


def test_weight_sync_sends_deltas_between_anchors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 arrives whole, 2 and 3 as deltas; readers of the region get the same bytes from either."""
    run = make_run(tmp_path)
    home = make_context(run, tmp_path, "weight_sync", 0)
    outcomes, sent = [], list[set[str]]()

    def noting(*arguments: Any, **named: Any) -> object:
        sent.append(set(named["sent"]))
        return publish_copy(*arguments, **named)

    monkeypatch.setattr(weight_sync, "publish_copy", noting)
    for k in range(3):
        _publish_chain(home, k + 2)
        outcomes.append(weight_sync.run_stage(make_context(run, tmp_path, "weight_sync", k, "b0", region="b")))

    assert [outcome.metrics["form"] for outcome in outcomes] == ["whole", "deltas", "deltas"]
    # Only the files of a whole version go on while others arrive.
    assert sent == [{part.name for part in resolve_policy(home.home, "r", 1).files}, set(), set()]
    whole, delta = outcomes[0].metrics["bytes"], outcomes[1].metrics["bytes"]
    assert isinstance(whole, int)
    assert isinstance(delta, int)
    assert 0 < delta < whole / 5
    region = open_store(run.roots["b"])
    assert [resolve_policy(region, "r", version).is_whole for version in (1, 2, 3)] == [True, False, False]
    reader = make_context(run, tmp_path, "generate", 2, "b0")
    for version in (1, 2, 3):
        found = policy_directory(reader, resolve_policy(reader.home, "r", version))
        assert weights_hash(files_of(found)) == resolve_policy(reader.home, "r", version).weights_hash


def test_w6_weight_sync_holds_a_lease_while_bytes_are_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W6: clean-up deleted a version before it was loaded."""
    run = make_run(tmp_path)
    home = make_context(run, tmp_path, "weight_sync", 0)
    _publish_chain(home, 2)
    seen: list[tuple[int, ...]] = []

    def spying(*arguments: Any, **named: Any) -> object:
        seen.extend(lease.policy_versions for lease in live_leases(home.home, "r", NOW))
        return publish_copy(*arguments, **named)

    monkeypatch.setattr(weight_sync, "publish_copy", spying)
    context = make_context(run, tmp_path, "weight_sync", 0, "b0", region="b")
    weight_sync.run_stage(context)
    context.close()

    assert seen == [(1,)]
    assert live_leases(home.home, "r", NOW) == []


def test_replicate_brings_the_rows_of_other_regions(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "replicate", 0)
    rows = rollout_rows(range(2))
    write_rollouts(open_store(run.roots["b"]), "r", 0, 0, 1, rows, input_fingerprint="f", created_by="t")

    first, second = replicate.run_stage(context), replicate.run_stage(context)

    assert (first.reused, first.metrics["copied"], second.reused, second.metrics["bytes"]) == (False, 1, True, 0)
    assert read_rollouts(context.store, "r", 0).num_rows == 4
