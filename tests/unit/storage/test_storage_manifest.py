"""The commit protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.errors import (
    AlreadyPublishedError,
    CorruptObjectError,
    InvalidInputError,
    InvalidNameError,
    ObjectMissingError,
    SchemaVersionError,
    TransientStorageError,
)
from storage.manifest import Manifest, PartSource, commit, find_valid, load_manifest, read_part
from storage.store import Store, open_store
from tests.helpers.faulty_store import Fault, FaultyStore

FOLDER = "run/policies/0"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def _commit(store: Store, content: bytes = b"content", fingerprint: str = "f", **changes: object) -> Manifest:
    fields = {"kind": "policy", "input_fingerprint": fingerprint, "created_by": "test", **changes}
    return commit(store, FOLDER, {"b.bin": PartSource(content), "a.txt": PartSource(b"a", rows=2)}, **fields)


def test_commit_writes_parts_under_its_attempt_and_one_manifest(store: Store) -> None:
    manifest = _commit(store, attempt="a1", policy_versions=[3, 1, 3], metadata={"note": "x"})
    assert [(part.name, part.path, part.size, part.rows) for part in manifest.parts] == [
        ("a.txt", "run/policies/0/a1/a.txt", 1, 2),
        ("b.bin", "run/policies/0/a1/b.bin", 7, None),
    ]
    assert (manifest.policy_versions, manifest.metadata, manifest.rows, manifest.size) == ((1, 3), {"note": "x"}, 2, 8)
    assert load_manifest(store, FOLDER) == manifest
    assert [info.key for info in store.list("")] == [
        "run/policies/0/a1/a.txt",
        "run/policies/0/a1/b.bin",
        "run/policies/0/manifest.json",
    ]


def test_same_content_again_is_success_and_writes_nothing(store: Store) -> None:
    first = _commit(store)
    before = [info.key for info in store.list("")]
    assert _commit(store) == first
    assert [info.key for info in store.list("")] == before


def test_other_content_for_the_same_inputs_is_refused_and_the_first_stands(store: Store) -> None:
    first = _commit(store)
    with pytest.raises(AlreadyPublishedError, match="the committed content stands: read it"):
        _commit(store, b"other")
    assert load_manifest(store, FOLDER) == first


def test_other_inputs_replace_the_manifest(store: Store) -> None:
    _commit(store)
    second = _commit(store, b"other", "g")
    assert load_manifest(store, FOLDER) == second
    assert find_valid(store, FOLDER, input_fingerprint="f") is None
    assert find_valid(store, FOLDER, input_fingerprint="g") == second


def test_duplicate_attempts_at_once_agree_on_the_first(tmp_path: Path) -> None:
    """Both attempts look before either has committed; the manifest decides."""
    root = open_store(str(tmp_path), is_retrying=False)
    rival: list[Manifest] = []

    class Interrupted(FaultyStore):
        def create(self, key: str, data: bytes) -> bool:
            rival.append(_commit(root))
            return super().create(key, data)

    assert _commit(Interrupted(root)) == rival[0] == load_manifest(root, FOLDER)


def test_duplicate_attempt_with_other_content_at_once_is_refused(tmp_path: Path) -> None:
    root = open_store(str(tmp_path), is_retrying=False)

    class Interrupted(FaultyStore):
        def create(self, key: str, data: bytes) -> bool:
            _commit(root)
            return super().create(key, data)

    with pytest.raises(AlreadyPublishedError):
        _commit(Interrupted(root), b"other")
    assert read_part(root, load_manifest(root, FOLDER).part("b.bin")) == b"content"


@pytest.mark.parametrize("damage", ["missing", "short", "zero"])
def test_damaged_part_makes_the_artefact_invalid_and_a_retry_replaces_it(store: Store, damage: str) -> None:
    part = _commit(store).part("b.bin")
    if damage == "missing":
        store.delete(part.path)
    else:
        store.publish(part.path, b"" if damage == "zero" else b"conte")
    assert find_valid(store, FOLDER) is None
    with pytest.raises((ObjectMissingError, CorruptObjectError), match=r"b\.bin"):
        read_part(store, part)
    assert read_part(store, _commit(store).part("b.bin")) == b"content"


def test_flipped_byte_is_found_by_hash(store: Store) -> None:
    part = _commit(store).part("b.bin")
    store.publish(part.path, b"cOntent")
    assert find_valid(store, FOLDER) is not None
    assert find_valid(store, FOLDER, is_hash_checked=True) is None
    with pytest.raises(CorruptObjectError, match="run `motley verify`"):
        read_part(store, part)


@pytest.mark.parametrize("torn", [b"", b'{"format": "motley.mani', b"[]", b"\xff\xfe", b'{"a": NaN}'])
def test_torn_manifest_is_typed_and_replaced(store: Store, torn: bytes) -> None:
    _commit(store)
    store.publish(f"{FOLDER}/manifest.json", torn)
    with pytest.raises(CorruptObjectError, match=r"policies/0/manifest\.json"):
        load_manifest(store, FOLDER)
    assert find_valid(store, FOLDER) is None
    _commit(store)
    assert read_part(store, load_manifest(store, FOLDER).part("b.bin")) == b"content"


def test_newer_manifest_is_refused_and_never_replaced(store: Store) -> None:
    _commit(store)
    document = json.loads(store.read_bytes(f"{FOLDER}/manifest.json"))
    store.publish(f"{FOLDER}/manifest.json", json.dumps({**document, "format": "motley.manifest/2"}).encode())
    for call in (lambda: load_manifest(store, FOLDER), lambda: find_valid(store, FOLDER), lambda: _commit(store)):
        with pytest.raises(SchemaVersionError, match=r"newer than 'motley.manifest/1' of this code; update"):
            call()


def test_faults_of_a_manifest_are_named_together(store: Store) -> None:
    _commit(store)
    document = json.loads(store.read_bytes(f"{FOLDER}/manifest.json"))
    document["parts"][0]["size"] = -1
    del document["attempt"]
    store.publish(f"{FOLDER}/manifest.json", json.dumps(document).encode())
    with pytest.raises(CorruptObjectError, match=r"field attempt .*field parts/0/size is -1"):
        load_manifest(store, FOLDER)


def test_store_that_loses_a_part_silently_is_caught_before_the_manifest(store: Store) -> None:
    class Losing(FaultyStore):
        def publish(self, key: str, data: bytes) -> None:
            super().publish(key, data[:-1])

    with pytest.raises(CorruptObjectError, match="the store lost what was just written"):
        _commit(Losing(store))
    assert find_valid(store, FOLDER) is None


def test_failed_write_leaves_no_manifest(store: Store) -> None:
    faulty = FaultyStore(store, at=2, fault=Fault.FAIL)
    with pytest.raises(TransientStorageError):
        _commit(faulty)
    assert faulty.calls[2][0] == "publish"
    assert find_valid(store, FOLDER) is None


def test_file_sources_are_committed_like_bytes(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "outside.bin"
    source.write_bytes(b"content")
    sources = {"b.bin": PartSource(source)}
    manifest = commit(store, FOLDER, sources, kind="policy", input_fingerprint="f", created_by="test")
    assert read_part(store, manifest.part("b.bin")) == b"content"


def test_part_that_is_not_there_is_named_with_those_there_are(store: Store) -> None:
    with pytest.raises(ObjectMissingError, match=r"no part 'c'; it has a\.txt, b\.bin"):
        _commit(store).part("c")


def test_nothing_to_commit_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInputError, match="at least one data object"):
        commit(store, FOLDER, {}, kind="policy", input_fingerprint="f", created_by="test")


def test_metadata_with_nan_is_refused_naming_the_field(store: Store) -> None:
    with pytest.raises(InvalidInputError, match="field /metadata/loss/1"):
        _commit(store, metadata={"loss": [1.0, float("nan")]})
    assert list(store.list("")) == []


@pytest.mark.parametrize("name", ["../up", "a//b", "/abs", ".hidden", "a b", "", "manifest.json/../x"])
def test_file_name_that_escapes_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidNameError):
        commit(store, FOLDER, {name: PartSource(b"")}, kind="k", input_fingerprint="f", created_by="test")
    assert list(store.list("")) == []


@pytest.mark.parametrize("attempt", ["7", "x.json", "a/b", ""])
def test_attempt_that_could_be_another_object_is_refused(store: Store, attempt: str) -> None:
    with pytest.raises(InvalidNameError):
        _commit(store, attempt=attempt)
