"""Adapter versions in the stages that commit, copy and read policies, on real stores and without engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from cli.errors import InputError
from cli.fork import copy_version, forked_run
from cli.run_lookup import FoundRun
from stages import commit_policy, weight_sync
from stages.context import StageContext
from stages.policy_files import loadable_policy
from stages.runs import ResolvedRun, create_run, entry_of
from storage.adapter_policies import base_of
from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import manifest_key, policy_folder
from storage.policies import Policy, head_version, publish_policy, resolve_policy
from storage.store import open_store
from storage.superseded import rewind
from tests.helpers.stage_contexts import make_context, make_run, publish
from tests.helpers.storage_builders import NOW

LORA_JOB = {"  training: {name: accelerate}": "  training: {name: accelerate, lora: {rank: 2}}"}


def make_lora_run(base: Path) -> ResolvedRun:
    return make_run(base, changes=LORA_JOB)


def publish_adapter(context: StageContext, version: int, *, is_head: bool = False) -> Policy:
    """Publish a resume point and an adapter on version 0."""
    base = resolve_policy(context.home, context.run.name, 0)
    publish(context, version)  # for its resume point; what stands there as a policy is replaced
    context.home.delete(manifest_key(policy_folder(context.run.name, version)))
    files = {"adapter_model.safetensors": save({"b": np.full(1, version, np.float32)}), "adapter_config.json": b"{}"}
    return publish_policy(
        context.home, context.run.name, version, files, created_by="test", metadata={"training": {"counts": {}}},
        is_head=is_head, adapter_base=base,
    )  # fmt: skip


def test_only_the_adapter_crosses_to_a_region_once_its_base_is_there(tmp_path: Path) -> None:
    run = make_lora_run(tmp_path)
    home = make_context(run, tmp_path, "weight_sync", 0)
    base = publish(home, 0, is_head=True)
    first = publish_adapter(home, 1, is_head=True)

    moved = weight_sync.run_stage(make_context(run, tmp_path, "weight_sync", 0, "b0", region="b")).metrics
    assert (moved["form"], moved["bytes"], moved["base_bytes"]) == ("adapter", first.size, base.size)

    second = publish_adapter(home, 2, is_head=True)
    context = make_context(run, tmp_path, "weight_sync", 1, "b0", region="b")
    moved = weight_sync.run_stage(context).metrics
    assert (moved["bytes"], moved["base_bytes"], moved["doubts"]) == (second.size, 0, [])
    region = open_store(run.roots["b"])
    assert base_of(region, resolve_policy(region, "r", 2)).weights_hash == base.weights_hash
    files = loadable_policy(context, second)
    assert files.base is not None
    assert (files.base.weights_hash, (files.directory / "adapter_model.safetensors").is_file()) == (
        base.weights_hash, True,
    )  # fmt: skip
    assert weight_sync.run_stage(context).reused


def test_whole_versions_have_no_base(tmp_path: Path) -> None:
    context = make_context(make_run(tmp_path), tmp_path, "generate", 0)
    assert loadable_policy(context, publish(context, 0, is_head=True)).base is None


def test_nothing_is_loaded_from_a_chain_that_does_not_hold(tmp_path: Path) -> None:
    run = make_lora_run(tmp_path)
    context = make_context(run, tmp_path, "generate", 1)
    publish(context, 0, is_head=True)
    policy = publish_adapter(context, 1, is_head=True)
    part = context.home.local_path(policy.manifest.part("adapter_model.safetensors").path)
    assert part is not None
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(ObjectMissingError, match="policies/1 cannot be leased"):  # torn, so it counts as not committed
        loadable_policy(context, policy)
    part.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(CorruptObjectError, match="tensors differ: b"):
        loadable_policy(context, policy)
    part.write_bytes(whole)
    context.home.delete(manifest_key(policy_folder("r", 0)))
    with pytest.raises(ObjectMissingError, match="is an adapter on version 0"):
        loadable_policy(context, policy)


def test_commit_refuses_an_adapter_without_its_base(tmp_path: Path) -> None:
    run = make_lora_run(tmp_path)
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, is_head=True)
    publish_adapter(context, 1)
    manifest = context.home.read_bytes(manifest_key(policy_folder("r", 0)))
    context.home.delete(manifest_key(policy_folder("r", 0)))
    with pytest.raises(ObjectMissingError, match="is an adapter on version 0"):
        commit_policy.run_stage(context)
    assert head_version(context.home, "r") == 0
    context.home.publish(manifest_key(policy_folder("r", 0)), manifest)
    commit_policy.run_stage(context)
    assert head_version(context.home, "r") == 1


def test_a_fork_and_a_rewind_keep_the_base(tmp_path: Path) -> None:
    run = make_lora_run(tmp_path)
    context = make_context(run, tmp_path, "train", 0)
    publish(context, 0, is_head=True)
    for version in (1, 2, 3):
        publish_adapter(context, version, is_head=True)
    parent = FoundRun(name="r", store=context.home, entry=entry_of(run))
    forked = forked_run(parent, 3, "branch", [], 9)
    create_run(forked)
    copy_version(parent.store, "r", parent.store, forked, 3)

    copied = resolve_policy(parent.store, "branch", 3)
    assert copied.weights_hash == resolve_policy(parent.store, "r", 3).weights_hash
    assert base_of(parent.store, copied).version == 0
    with pytest.raises(InputError, match=r"can't change engines\.training\.lora"):
        forked_run(parent, 3, "other", ["engines.training.lora.rank=1"], 9)

    rewind(context.home, [], "r", 1, reason="test", at=NOW)
    assert head_version(context.home, "r") == 1
    assert base_of(context.home, resolve_policy(context.home, "r", 1)).version == 0
    again = publish_adapter(context, 2, is_head=True)
    assert again.adapter is not None
