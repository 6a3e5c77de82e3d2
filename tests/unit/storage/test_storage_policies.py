"""Policy versions, the head, and the hash of tensors."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from storage.errors import (
    AlreadyPublishedError,
    CorruptObjectError,
    InvalidInputError,
    ObjectMissingError,
    PolicyVersionError,
)
from storage.layout import policy_head
from storage.policies import (
    advance_head,
    head_version,
    publish_policy,
    read_head,
    resolve_policy,
    roll_back_head,
)
from storage.policy_fetch import fetch_policy, local_policy_folder
from storage.store import Store, open_store
from storage.weights_hash import TensorEntry, read_header, weights_hash
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN, policy_files, safetensors_bytes


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"), is_synced=False)


def _publish(store: Store, version: int, value: int | None = None) -> str:
    files = policy_files(version if value is None else value)
    return publish_policy(store, RUN, version, files, created_by="test").weights_hash


def test_published_policy_is_loadable_in_place(store: Store) -> None:
    policy = publish_policy(store, RUN, 0, policy_files(), created_by="test", metadata={"dtype": "float32"})
    folder = local_policy_folder(store, policy)
    assert folder is not None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == policy_files()
    assert policy.manifest.metadata == {"dtype": "float32", "weights_hash": weights_hash(policy_files())}


def test_publishing_again_is_success_and_keeps_the_head(store: Store) -> None:
    for version in (0, 1, 2):
        _publish(store, version)
    before = sorted(info.key for info in store.list(""))
    assert _publish(store, 1) == weights_hash(policy_files(1))
    assert head_version(store, RUN) == 2
    assert sorted(info.key for info in store.list("")) == before


def test_other_weights_for_a_committed_version_are_refused(store: Store) -> None:
    """W7, T9: what was served must not change under its version."""
    first = _publish(store, 0)
    with pytest.raises(AlreadyPublishedError):
        _publish(store, 0, value=9)
    assert resolve_policy(store, RUN, 0).weights_hash == first


def test_t9_version_below_the_head_is_refused(store: Store) -> None:
    """T9: a restarted trainer served step 0 again."""
    _publish(store, 3)
    with pytest.raises(PolicyVersionError, match="below the head 3 and was never committed; use roll_back_head"):
        _publish(store, 1)
    assert head_version(store, RUN) == 3


def test_head_moves_back_only_with_a_record(store: Store) -> None:
    for version in (0, 1):
        _publish(store, version)
    with pytest.raises(PolicyVersionError, match="never goes back to 0"):
        advance_head(store, RUN, 0)
    with pytest.raises(InvalidInputError, match="needs a reason"):
        roll_back_head(store, RUN, 0, reason=" ", at=NOW)
    with pytest.raises(PolicyVersionError, match="so 1 is no rollback"):
        roll_back_head(store, RUN, 1, reason="why", at=NOW)
    head = roll_back_head(store, RUN, 0, reason="diverged", at=NOW)
    assert [(entry.from_version, entry.to_version, entry.reason) for entry in head.rollbacks] == [(1, 0, "diverged")]
    assert advance_head(store, RUN, 1).rollbacks == head.rollbacks
    assert head_version(store, RUN) == 1


def test_versions_above_a_rollback_are_made_anew_and_those_below_stand(store: Store) -> None:
    for version in (0, 1, 2):
        _publish(store, version)
    roll_back_head(store, RUN, 1, reason="diverged", at=NOW)
    assert _publish(store, 2, value=9) == weights_hash(policy_files(9))
    assert resolve_policy(store, RUN).weights_hash == weights_hash(policy_files(9))
    with pytest.raises(AlreadyPublishedError):
        _publish(store, 1, value=9)


def test_head_cannot_name_what_is_not_committed(store: Store) -> None:
    with pytest.raises(ObjectMissingError):
        advance_head(store, RUN, 5)
    assert read_head(store, RUN) is None
    with pytest.raises(ObjectMissingError, match="has no policy yet"):
        resolve_policy(store, RUN)


def test_policy_crashed_before_its_head_gets_it_from_the_retry(store: Store) -> None:
    _publish(store, 0)
    counting = FaultyStore(store)
    _publish(counting, 1, value=7)
    at = next(n for n, (name, key) in enumerate(counting.calls) if name == "publish" and key == policy_head(RUN))
    other = open_store(f"memory://{RUN}-head")
    _publish(other, 0)
    with pytest.raises(Crash):
        _publish(FaultyStore(other, at, Fault.CRASH), 1, value=7)
    assert head_version(other, RUN) == 0
    _publish(other, 1, value=7)
    assert head_version(other, RUN) == 1


def test_version_need_not_become_the_head(store: Store) -> None:
    publish_policy(store, RUN, 4, policy_files(), created_by="test", is_head=False)
    assert head_version(store, RUN) is None
    assert resolve_policy(store, RUN, 4).version == 4


def test_head_that_contradicts_its_policy_is_refused(store: Store) -> None:
    _publish(store, 0)
    data = store.read_bytes(policy_head(RUN)).replace(weights_hash(policy_files(0)).encode(), b"0" * 64)
    store.publish(policy_head(RUN), data)
    with pytest.raises(CorruptObjectError, match="run `motley verify`"):
        resolve_policy(store, RUN)


@pytest.mark.parametrize("torn", [b"", b'{"format": "motley.pol', b'{"format": "motley.policy_head/1"}'])
def test_c4_torn_head_is_typed_and_never_taken_for_a_fresh_run(store: Store, torn: bytes) -> None:
    """C4, C25: a torn progress file must stop, not start anew."""
    store.publish(policy_head(RUN), torn)
    with pytest.raises(CorruptObjectError, match=r"head\.json"):
        head_version(store, RUN)
    with pytest.raises(CorruptObjectError):
        _publish(store, 0)


@pytest.mark.parametrize("length", [0, 4, 8, 40, -1])
def test_c2_truncated_safetensors_is_never_published(store: Store, length: int) -> None:
    """C2: truncated safetensors were trusted by their folder's name."""
    files = {**policy_files(), "model.safetensors": policy_files()["model.safetensors"][:length]}
    with pytest.raises(CorruptObjectError, match=r"model\.safetensors"):
        publish_policy(store, RUN, 0, files, created_by="test")
    assert list(store.list("")) == []


def test_c2_policy_truncated_after_its_commit_is_never_fetched(store: Store, tmp_path: Path) -> None:
    """C2: completeness is proved by the manifest, not by names."""
    policy = publish_policy(store, RUN, 0, policy_files(), created_by="test")
    store.publish(policy.manifest.part("model.safetensors").path, policy_files()["model.safetensors"][:-1])
    with pytest.raises(CorruptObjectError, match=r"model\.safetensors has .* bytes"):
        fetch_policy([store], policy, tmp_path / "copy")
    assert list(tmp_path.glob("*copy*")) == []


def test_fetch_replaces_a_damaged_copy_and_reuses_a_good_one(store: Store, tmp_path: Path) -> None:
    policy = publish_policy(store, RUN, 0, policy_files(), created_by="test")
    folder = fetch_policy([store], policy, tmp_path / "a" / "copy").local.folder
    (folder / "model.safetensors").write_bytes(b"damaged")
    fetch_policy([store], policy, folder)
    counting = FaultyStore(store)
    assert fetch_policy([counting], policy, folder).form == "present"
    assert counting.calls == []
    assert (folder / "model.safetensors").read_bytes() == policy_files()["model.safetensors"]


def test_policy_from_files_equals_policy_from_bytes(store: Store, tmp_path: Path) -> None:
    for name, data in policy_files().items():
        (tmp_path / name).write_bytes(data)
    files = {name: tmp_path / name for name in policy_files()}
    first = publish_policy(store, RUN, 0, files, created_by="test")
    assert publish_policy(store, RUN, 0, policy_files(), created_by="test") == first


def test_weights_hash_does_not_depend_on_the_split_into_files() -> None:
    whole = weights_hash({"model.safetensors": safetensors_bytes({"a": [1, 2], "b": [3]})})
    parts = {"x.safetensors": safetensors_bytes({"b": [3]}), "y.safetensors": safetensors_bytes({"a": [1, 2]})}
    assert weights_hash({**parts, "config.json": b"{}"}) == whole


@pytest.mark.parametrize(
    "other",
    [
        safetensors_bytes({"a": [1, 3], "b": [3]}),
        safetensors_bytes({"a": [1, 2], "c": [3]}),
        safetensors_bytes({"a": [1], "b": [2, 3]}),
        safetensors_bytes({"a": [1, 2], "b": [3]}, dtype="I8"),
    ],
)
def test_weights_hash_sees_values_names_shapes_and_types(other: bytes) -> None:
    assert weights_hash({"m.safetensors": safetensors_bytes({"a": [1, 2], "b": [3]})}) != weights_hash(
        {"m.safetensors": other}
    )


def test_header_of_the_reference_writer_is_understood() -> None:
    data = save({"w": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float16)}, metadata={"format": "pt"})
    start = 8 + int.from_bytes(data[:8], "little")
    assert sorted(read_header(io.BytesIO(data), len(data), "m"), key=lambda entry: entry.name) == [
        TensorEntry("b", "F16", (2,), start + 24, 4),
        TensorEntry("w", "F32", (2, 3), start, 24),
    ]


def test_policy_without_tensors_or_with_doubled_ones_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInputError, match=r"needs \*\.safetensors files, found config\.json"):
        publish_policy(store, RUN, 0, {"config.json": b"{}"}, created_by="test")
    doubled = {name: safetensors_bytes({"a": [1]}) for name in ("x.safetensors", "y.safetensors")}
    with pytest.raises(InvalidInputError, match=r"tensor a occurs in y\.safetensors and in another"):
        publish_policy(store, RUN, 0, doubled, created_by="test")
    with pytest.raises(CorruptObjectError, match="contradicts its type"):
        publish_policy(store, RUN, 0, {"m.safetensors": safetensors_bytes({"a": [1]}, "F32")}, created_by="test")
