"""Adapters on a base, drawn at random: what is proved is what was published, and nothing kept lacks its base."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from storage.adapter_policies import base_of, prove_adapter
from storage.errors import CorruptObjectError, ObjectMissingError, StorageError
from storage.layout import iteration_record, manifest_key, policy_folder
from storage.policies import LocalPolicy, Policy, publish_policy, resolve_policy
from storage.policy_fetch import fetch_policy
from storage.retention import RetentionRule, apply_retention
from storage.store import Store, open_store

RUN = "r"
NAMES = ("adapter_model.safetensors", "adapter_config.json")


def base_files(seed: int) -> dict[str, bytes]:
    return {"model.safetensors": save({"w": np.random.default_rng(seed).standard_normal(50)})}


def adapter_files(seed: int, rank: int = 2, layers: int = 2) -> dict[str, bytes]:
    draw = np.random.default_rng(seed)
    tensors = {f"l{n}.lora_{part}.weight": draw.standard_normal((rank, 3)) for n in range(layers) for part in "AB"}
    return {NAMES[0]: save(tensors), NAMES[1]: b"{}"}


@given(
    seed=st.integers(0, 1000),
    rank=st.integers(1, 5),
    layers=st.integers(1, 3),
    place=st.integers(0),
    bit=st.integers(0, 7),
)
@settings(max_examples=40, deadline=None)
def test_a_flipped_bit_is_refused_or_changes_no_tensor(seed: int, rank: int, layers: int, place: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"{folder}/store", is_synced=False)
        base = publish_policy(store, RUN, 0, base_files(seed), created_by="t")
        files = adapter_files(seed, rank, layers)
        policy = publish_policy(store, RUN, 1, files, created_by="t", adapter_base=base)
        local = fetch_policy([store], policy, Path(folder) / "here").local
        prove_adapter(local)
        path = local.folder / NAMES[0]
        assert path.read_bytes() == files[NAMES[0]]
        torn = bytearray(files[NAMES[0]])
        torn[place % len(torn)] ^= 1 << bit
        path.write_bytes(torn)
        before = {name: value.tobytes() for name, value in _tensors(files[NAMES[0]], folder).items()}
        try:
            prove_adapter(local)
        except CorruptObjectError:
            return
        assert {name: value.tobytes() for name, value in load_file(path).items()} == before


def _tensors(data: bytes, folder: str) -> dict[str, np.ndarray]:
    path = Path(folder) / "whole.safetensors"
    path.write_bytes(data)
    tensors: dict[str, np.ndarray] = load_file(path)
    return tensors


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Versions 1 to n, each whole or an adapter on some earlier version, possible or not."""
    count = draw(st.integers(1, 6))
    return [(draw(st.sampled_from(["whole", "adapter"])), draw(st.integers(0, 6))) for _ in range(count)]


@given(history=histories(), keep=st.integers(1, 3), lost=st.none() | st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_can_be_made_whatever_the_history(
    history: list[tuple[str, int]], keep: int, lost: int | None
) -> None:
    """An adapter is published only on a whole earlier version; retention keeps it; one that is lost is an error."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"{folder}/store", is_synced=False)
        kinds = {0: "whole"}
        publish_policy(store, RUN, 0, base_files(0), created_by="t")
        for version, (kind, on) in enumerate(history, 1):
            is_possible = kind == "whole" or kinds.get(on) == "whole"
            try:
                _publish(store, version, kind, on)
            except StorageError:
                assert not is_possible
                _publish(store, version, "whole", 0)  # versions have no gaps
                kind = "whole"
            else:
                assert is_possible
            kinds[version] = kind
            store.publish(iteration_record(RUN, version - 1), b"{}")
        apply_retention(store, RUN, RetentionRule(keep_newest=keep, keep_always=()), datetime(2026, 1, 1, tzinfo=UTC))
        kept = [version for version in kinds if store.exists(manifest_key(policy_folder(RUN, version)))]
        assert set(sorted(kinds)[-keep:]) <= set(kept)
        if lost in kept:
            store.delete(manifest_key(policy_folder(RUN, lost)))
        for version in kept:
            if version != lost:
                _check(store, resolve_policy(store, RUN, version), lost, Path(folder))


def _publish(store: Store, version: int, kind: str, on: int) -> Policy:
    if kind == "whole":
        return publish_policy(store, RUN, version, base_files(version), created_by="t")
    base = resolve_policy(store, RUN, on)
    return publish_policy(store, RUN, version, adapter_files(version), created_by="t", adapter_base=base)


def _check(store: Store, policy: Policy, lost: int | None, folder: Path) -> None:
    if policy.adapter is None:
        return
    try:
        base = base_of(store, policy)
    except ObjectMissingError:
        assert policy.adapter.base_version == lost
        return
    assert (base.adapter, base.weights_hash) == (None, policy.adapter.base_weights_hash)
    prove_adapter(LocalPolicy(policy, fetch_policy([store], policy, folder / str(policy.version)).local.folder))
