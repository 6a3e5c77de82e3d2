"""Resume points; each test names the fault of which it is the answer."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest

from storage.checkpoints import load_checkpoint, read_checkpoint_file, read_index, save_checkpoint, set_index
from storage.errors import (
    AlreadyPublishedError,
    CorruptObjectError,
    InvalidInputError,
    ObjectMissingError,
    ResumeMismatchError,
)
from storage.layout import checkpoint_index
from storage.manifest import Manifest
from storage.store import Store, open_store
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import RUN


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "not" / "yet" / "there"), is_synced=False)


def _save(store: Store, version: int, files: dict[str, bytes] | None = None, **changes: object) -> Manifest:
    fields = {
        "config_hash": "c" * 64,
        "dataset_fingerprint": "d" * 64,
        "data_position": {"epoch": 0, "index": version},
        "rng_files": ["rng-0.bin"],
        "created_by": "test",
        **changes,
    }
    return save_checkpoint(store, RUN, version, files or {"opt.bin": b"state", "rng-0.bin": b"rng"}, **fields)


def test_c1_newest_complete_is_loaded_and_torn_ones_are_reported(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """C1: resume picked the newest, half-written folder."""
    for version in (1, 2, 3):
        _save(store, version)
    newest = _save(store, 4)
    store.publish(newest.part("opt.bin").path, b"sta")
    with pytest.raises(Crash):
        _save(FaultyStore(store, at=3, fault=Fault.CRASH), 5)
    with caplog.at_level(logging.WARNING):
        found = load_checkpoint(store, RUN)
    assert found.version == 3
    assert [entry.version for entry in found.skipped] == [5, 4]
    assert "opt.bin has 3 bytes, its manifest says 5" in found.skipped[1].reason
    assert [record.args[1] for record in caplog.records] == [5, 4]


def test_c2_checkpoint_without_its_manifest_does_not_exist(store: Store) -> None:
    """C2: the completeness marker is written last."""
    store.delete(_save(store, 1).key)
    with pytest.raises(CorruptObjectError, match="none of 1 resume points is complete"):
        load_checkpoint(store, RUN)


def test_c8_position_in_the_data_comes_back_with_its_version(store: Store) -> None:
    """C8: the data position was not saved."""
    for version in (1, 2):
        _save(store, version, data_position={"epoch": version - 1, "index": 10 * version})
    assert load_checkpoint(store, RUN).data_position == {"epoch": 1, "index": 20}
    assert load_checkpoint(store, RUN, 1).data_position == {"epoch": 0, "index": 10}


@pytest.mark.parametrize("at", range(9))
def test_c27_waiting_rollouts_are_committed_with_their_version_or_not_at_all(store: Store, at: int) -> None:
    """C27: a replay buffer was saved with its gaps refilled, apart from the version."""
    _save(store, 1, metadata={"buffer": {"version": 1}})
    with suppress(Crash):
        _save(FaultyStore(store, at, Fault.CRASH), 2, metadata={"buffer": {"version": 2}})
    found = load_checkpoint(store, RUN)
    assert found.manifest.metadata["buffer"] == {"version": found.version}
    assert found.data_position["index"] == found.version


def test_c13_another_data_set_is_refused(store: Store) -> None:
    """C13: the data set had changed; resume skipped rows of the new one."""
    _save(store, 1)
    with pytest.raises(ResumeMismatchError, match="dataset fingerprint is dddddddddddd, this run's is eeeeeeeeeeee"):
        load_checkpoint(store, RUN, config_hash="c" * 64, dataset_fingerprint="e" * 64)


def test_c14_another_configuration_is_refused(store: Store) -> None:
    """C14: a model mismatch was silently accepted."""
    _save(store, 1)
    with pytest.raises(ResumeMismatchError, match="configuration hash is cccccccccccc, this run's is xxxxxxxxxxxx"):
        load_checkpoint(store, RUN, config_hash="x" * 64, dataset_fingerprint="d" * 64)


def test_c13_c14_both_faults_are_named_together(store: Store) -> None:
    """C13, C14."""
    _save(store, 1)
    with pytest.raises(ResumeMismatchError, match=r"configuration hash .*dataset fingerprint"):
        load_checkpoint(store, RUN, config_hash="x" * 64, dataset_fingerprint="e" * 64)


def test_c16_folders_are_created_by_the_first_write(store: Store) -> None:
    """C16: saving failed since the folder did not exist."""
    manifest = _save(store, 1)
    assert [info.key for info in store.list("")] == sorted(
        [*(part.path for part in manifest.parts), manifest.key, checkpoint_index(RUN)]
    )


def test_c18_folders_that_another_process_created_are_no_error(tmp_path: Path) -> None:
    """C18: mkdir raced on a parallel file system."""
    from concurrent.futures import ThreadPoolExecutor

    for attempt in range(20):
        stores = [open_store(str(tmp_path / str(attempt)), is_synced=False) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda pair: pair[1].publish(f"a/b/c/d/{pair[0]}", b"x"), enumerate(stores)))
        assert [info.key for info in stores[0].list("")] == [f"a/b/c/d/{number}" for number in range(8)]


@pytest.mark.parametrize("torn", [b"", b'{"format": "motley.checkpoint_index/1", "versi'])
def test_c25_unreadable_index_stops_instead_of_starting_afresh(store: Store, torn: bytes) -> None:
    """C25: unreadable recovery information led to a silent fresh start."""
    _save(store, 1)
    store.publish(checkpoint_index(RUN), torn)
    with pytest.raises(CorruptObjectError, match=r"index\.json"):
        load_checkpoint(store, RUN)


def test_c25_no_resume_point_is_an_error_and_not_a_fresh_start(store: Store) -> None:
    """C25: a fresh start is the caller's explicit decision."""
    with pytest.raises(ObjectMissingError, match="start from its initial policy explicitly"):
        load_checkpoint(store, RUN)


def test_exact_version_is_loaded_or_refused(store: Store) -> None:
    for version in (1, 2):
        _save(store, version)
    assert load_checkpoint(store, RUN, 1).data_position == {"epoch": 0, "index": 1}
    with pytest.raises(ObjectMissingError):
        load_checkpoint(store, RUN, 7)
    store.delete(load_checkpoint(store, RUN, 2).manifest.part("opt.bin").path)
    with pytest.raises(CorruptObjectError, match=r"trainer/2 is torn: .*opt\.bin is missing"):
        load_checkpoint(store, RUN, 2)


def test_checkpoint_committed_before_its_index_entry_is_found(store: Store) -> None:
    _save(store, 1)
    _save(store, 2)
    set_index(store, RUN, {1})
    assert load_checkpoint(store, RUN).version == 2
    _save(store, 2)
    assert read_index(store, RUN) == (1, 2)


def test_flipped_byte_in_a_file_is_found_when_it_is_read(store: Store) -> None:
    store.publish(_save(store, 1).part("opt.bin").path, b"stAte")
    found = load_checkpoint(store, RUN)
    assert read_checkpoint_file(store, found, "rng-0.bin") == b"rng"
    with pytest.raises(CorruptObjectError, match=r"opt\.bin"):
        read_checkpoint_file(store, found, "opt.bin")


def test_rng_of_every_rank_must_be_among_the_files(store: Store) -> None:
    for rng_files in ([], ["rng-0.bin", "rng-1.bin"]):
        with pytest.raises(InvalidInputError, match="one file per rank is needed"):
            _save(store, 1, rng_files=rng_files)
    assert list(store.list("")) == []


def test_other_content_for_a_committed_version_is_refused(store: Store) -> None:
    _save(store, 1)
    with pytest.raises(AlreadyPublishedError):
        _save(store, 1, {"opt.bin": b"other", "rng-0.bin": b"rng"})
