"""Versions that are an adapter on a whole version: hashes, chains of two links, copies, retention, verification."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from storage.adapter_policies import base_of, prove_adapter
from storage.errors import AlreadyPublishedError, CorruptObjectError, InvalidInputError, ObjectMissingError
from storage.layout import iteration_record, manifest_key, policy_folder
from storage.policies import LocalPolicy, Policy, publish_policy, resolve_policy
from storage.policy_copies import bases_needed, find_copy, publish_copy
from storage.policy_fetch import fetch_policy
from storage.retention import RetentionRule, apply_retention
from storage.store import Store, open_store
from storage.verify import verify_run
from storage.weights_hash import weights_hash
from tests.helpers.storage_builders import RUN

BASE_FILES = {"model.safetensors": save({"w": np.arange(5000, dtype=np.float32)}), "config.json": b"{}"}


def adapter_files(version: int) -> dict[str, bytes]:
    tensors = {"w.lora_A.weight": np.full((2, 4), version, np.float32), "w.lora_B.weight": np.ones((4, 2), np.float32)}
    return {"adapter_model.safetensors": save(tensors), "adapter_config.json": b'{"r": 2}'}


def publish_adapter(store: Store, version: int, base: Policy, files: dict[str, bytes] | None = None) -> Policy:
    return publish_policy(
        store, RUN, version, adapter_files(version) if files is None else files, created_by="t", adapter_base=base
    )


@pytest.fixture
def home(tmp_path: Path) -> Store:
    """Version 0 whole, versions 1 to 5 adapters on it."""
    store = open_store(str(tmp_path / "home"), is_synced=False)
    base = publish_policy(store, RUN, 0, BASE_FILES, created_by="t")
    for version in range(1, 6):
        publish_adapter(store, version, base)
    return store


def test_an_adapter_version_names_its_base_and_holds_only_the_adapter(home: Store) -> None:
    base, policy = resolve_policy(home, RUN, 0), resolve_policy(home, RUN, 2)
    assert policy.adapter is not None
    assert (policy.adapter.base_version, policy.adapter.base_weights_hash) == (0, base.weights_hash)
    assert (policy.is_whole, policy.delta) == (True, None)
    assert policy.size < base.size / 20
    assert sorted(policy.manifest.metadata["adapter"]["tensors"]) == ["w.lora_A.weight", "w.lora_B.weight"]
    assert base_of(home, policy).weights_hash == base.weights_hash


def test_the_hash_is_of_base_and_adapter_together(tmp_path: Path) -> None:
    """The same adapter on another base is another policy, and no adapter has the hash of a whole model."""
    store = open_store(str(tmp_path / "s"), is_synced=False)
    one = publish_policy(store, RUN, 0, BASE_FILES, created_by="t")
    other = publish_policy(store, "other", 0, {"m.safetensors": save({"w": np.zeros(3)})}, created_by="t")
    files = adapter_files(1)
    first = publish_policy(store, RUN, 1, files, created_by="t", adapter_base=one)
    second = publish_policy(store, "other", 1, files, created_by="t", adapter_base=other)
    assert len({first.weights_hash, second.weights_hash, weights_hash(files)}) == 3


def test_publishing_again_is_success_and_other_tensors_are_refused(home: Store) -> None:
    base = resolve_policy(home, RUN, 0)
    again = publish_adapter(home, 5, base)
    assert again.weights_hash == resolve_policy(home, RUN, 5).weights_hash
    with pytest.raises(AlreadyPublishedError):
        publish_adapter(home, 5, base, adapter_files(9))


def test_adapters_are_never_stacked(home: Store) -> None:
    with pytest.raises(InvalidInputError, match="whole weights"):
        publish_adapter(home, 6, resolve_policy(home, RUN, 5))


def test_a_base_of_another_run_or_a_later_version_is_refused(home: Store) -> None:
    foreign = publish_policy(home, "other", 0, {"m.safetensors": save({"w": np.zeros(3)})}, created_by="t")
    with pytest.raises(InvalidInputError, match="its base is an earlier version of the same run"):
        publish_adapter(home, 6, foreign)
    whole = publish_policy(home, "other", 7, {"m.safetensors": save({"w": np.ones(3)})}, created_by="t")
    with pytest.raises(ObjectMissingError):
        publish_adapter(home, 6, whole)
    with pytest.raises(InvalidInputError, match="no delta"):
        publish_policy(
            home, RUN, 6, adapter_files(6), created_by="t", adapter_base=resolve_policy(home, RUN, 0),
            base=LocalPolicy(resolve_policy(home, RUN, 0), Path("nowhere")),
        )  # fmt: skip


def test_a_missing_base_is_named_before_anything_is_fetched(home: Store) -> None:
    policy = resolve_policy(home, RUN, 3)
    home.delete(manifest_key(policy_folder(RUN, 0)))
    with pytest.raises(ObjectMissingError, match="version 3 is an adapter on version 0"):
        base_of(home, policy)


def test_a_base_with_other_weights_is_refused(home: Store) -> None:
    policy = resolve_policy(home, RUN, 3)
    home.delete(manifest_key(policy_folder(RUN, 0)))
    _republish(home)
    with pytest.raises(CorruptObjectError, match="but that version has"):
        base_of(home, policy)


def _republish(store: Store) -> None:
    """Put other weights under version 0, as nobody but a hand with a shell can."""
    store.delete(f"{RUN}/policies/head.json")
    publish_policy(store, RUN, 0, {"model.safetensors": save({"w": np.zeros(4)})}, created_by="t")


def test_only_the_adapter_is_fetched_and_proved(home: Store, tmp_path: Path) -> None:
    policy = resolve_policy(home, RUN, 4)
    found = fetch_policy([home], policy, tmp_path / "four")
    assert (found.form, found.num_bytes, found.doubts) == ("adapter", policy.size, ())
    prove_adapter(found.local)
    assert fetch_policy([home], policy, tmp_path / "four").form == "present"


@pytest.mark.parametrize("how", ["truncated", "changed", "swapped", "gone"])
def test_a_torn_adapter_is_not_proved(home: Store, tmp_path: Path, how: str) -> None:
    local = fetch_policy([home], resolve_policy(home, RUN, 4), tmp_path / "four").local
    path = local.folder / "adapter_model.safetensors"
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-3])
    elif how == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "swapped":
        path.write_bytes(adapter_files(3)["adapter_model.safetensors"])
    else:
        path.unlink()
    with pytest.raises(CorruptObjectError):
        prove_adapter(local)


def test_a_region_gets_the_base_once_and_then_adapters(home: Store, tmp_path: Path) -> None:
    region = open_store(str(tmp_path / "region"), is_synced=False)
    policy = resolve_policy(home, RUN, 4)
    local = fetch_policy([home], policy, tmp_path / "four").local
    alone = publish_copy(region, local, policy, delta=None, base=None, created_by="t")
    assert alone.weights_hash == policy.weights_hash
    assert find_copy(region, policy) is None  # its base is not there, so nobody in the region can use it
    base = resolve_policy(home, RUN, 0)
    publish_copy(
        region, fetch_policy([home], base, tmp_path / "zero").local, base, delta=None, base=None, created_by="t"
    )
    assert find_copy(region, policy) is not None
    assert bases_needed(region, RUN, [4]) == {0}


def test_retention_keeps_the_base_of_what_it_keeps(home: Store) -> None:
    for iteration in range(5):
        home.publish(iteration_record(RUN, iteration), b"{}")
    rule = RetentionRule(keep_newest=2, keep_always=())  # nothing but the adapters asks for version 0
    report = apply_retention(home, RUN, rule, datetime(2026, 1, 1, tzinfo=UTC))
    assert policy_folder(RUN, 1) in report.deleted
    assert base_of(home, resolve_policy(home, RUN, 5)).version == 0


def test_verify_says_that_a_base_is_missing(home: Store) -> None:
    assert not [f for f in verify_run(home, RUN).findings if "policies" in f.key and f.severity == "error"]
    home.delete(manifest_key(policy_folder(RUN, 0)))
    wrong = [f for f in verify_run(home, RUN).findings if "is an adapter on version 0" in f.message]
    assert len(wrong) == 5
