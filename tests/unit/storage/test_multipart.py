"""Files in parts: in order, each part repeated alone, nothing left of an upload that fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from storage import multipart
from storage.errors import (
    CorruptObjectError,
    PermissionDeniedError,
    StorageError,
    StoreAccessError,
    TransientStorageError,
)
from storage.retry import RetryingStore, RetryPolicy
from tests.helpers.dict_store import DictStore

PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART_BYTES", PART)


class PartStore(DictStore):
    """Takes parts; chosen calls fail as often as said."""

    def __init__(self, failures: dict[str, list[StorageError]] | None = None) -> None:
        super().__init__("parts")
        self.failures = failures or {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.calls: list[str] = []
        self.together = self.most_together = 0
        self._lock = threading.Lock()

    def begin_upload(self, key: str) -> str:
        self._called("begin")
        self.uploads[key] = {}
        return key

    def upload_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        with self._lock:
            self.together += 1
            self.most_together = max(self.most_together, self.together)
        try:
            self._called(f"part {number}")
            self.uploads[upload][number] = data
        finally:
            with self._lock:
                self.together -= 1
        return f"tag-{number}"

    def finish_upload(self, key: str, upload: str, tags: Sequence[str]) -> None:
        if upload not in self.uploads:
            raise StoreAccessError("no such upload", key=key)
        parts = self.uploads.pop(upload)
        assert [*tags] == [f"tag-{number}" for number in range(1, len(parts) + 1)]
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        self._called("finish")

    def abandon_upload(self, key: str, upload: str) -> None:
        self._called("abandon")
        self.uploads.pop(upload, None)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if left := self.failures.get(name):
            raise left.pop()


def _file(folder: Path, num_bytes: int) -> Path:
    path = folder / "file"
    path.write_bytes(random.Random(num_bytes).randbytes(num_bytes))
    return path


def _retrying(store: PartStore, tries: int = 3) -> RetryingStore:
    return RetryingStore(store, RetryPolicy(max_tries=tries), lambda _: None)


@pytest.mark.parametrize("num_bytes", [2 * PART + 1, 7 * PART, 30 * PART - 1])
def test_parts_make_the_file(tmp_path: Path, num_bytes: int) -> None:
    store, path = PartStore(), _file(tmp_path, num_bytes)
    _retrying(store).publish_file("run/a", path)
    assert store.objects == {"run/a": path.read_bytes()}
    assert len(store.calls) == 2 + -(-num_bytes // PART)
    assert store.most_together <= multipart.PARTS_IN_FLIGHT


def test_small_file_is_one_call(tmp_path: Path) -> None:
    store, path = PartStore(), _file(tmp_path, 2 * PART)
    _retrying(store).publish_file("run/a", path)
    assert (store.objects, store.calls) == ({"run/a": path.read_bytes()}, [])


def test_part_that_fails_is_repeated_alone(tmp_path: Path) -> None:
    store, path = PartStore({"part 2": [TransientStorageError("x"), TransientStorageError("x")]}), _file(tmp_path, 5000)
    _retrying(store).publish_file("run/a", path)
    assert store.objects == {"run/a": path.read_bytes()}
    assert sorted(store.calls) == ["begin", "finish", "part 1", *["part 2"] * 3, "part 3", "part 4", "part 5"]


@pytest.mark.parametrize("call", ["begin", "part 1", "part 5", "finish"])
def test_upload_that_fails_for_good_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store, path = PartStore({call: [PermissionDeniedError("x")]}), _file(tmp_path, 5000)
    if call == "finish":  # a store that refuses has made nothing
        monkeypatch.setattr(store, "finish_upload", lambda *_: store._called("finish"))
    with pytest.raises(PermissionDeniedError):
        _retrying(store).publish_file("run/a", path)
    assert (store.objects, store.uploads) == ({}, {})
    assert store.calls.count(call) == 1
    assert (store.calls[-1] == "abandon") is (call != "begin")


def test_store_that_never_answers_a_part_is_given_up(tmp_path: Path) -> None:
    store, path = PartStore({"part 3": [TransientStorageError("x")] * 9}), _file(tmp_path, 5000)
    with pytest.raises(TransientStorageError, match="asked 3 times"):
        _retrying(store).publish_file("run/a", path)
    assert (store.objects, store.uploads, store.calls.count("part 3")) == ({}, {}, 3)


def test_lost_answer_to_the_end_of_an_upload_is_no_failure(tmp_path: Path) -> None:
    store, path = PartStore({"finish": [TransientStorageError("lost")]}), _file(tmp_path, 5000)
    _retrying(store).publish_file("run/a", path)
    assert store.objects == {"run/a": path.read_bytes()}
    assert "abandon" not in store.calls


def test_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = PartStore(), _file(tmp_path, 5000)
    begin = store.begin_upload

    def shrink(key: str) -> str:
        path.write_bytes(b"short")
        return begin(key)

    monkeypatch.setattr(store, "begin_upload", shrink)
    with pytest.raises(CorruptObjectError, match="ends at byte 5, but had 5000 bytes"):
        _retrying(store).publish_file("run/a", path)
    assert (store.objects, store.uploads) == ({}, {})
