"""What every store must do, whatever lies below it."""

from __future__ import annotations

import hashlib
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.errors import (
    BucketMissingError,
    CorruptObjectError,
    CredentialsError,
    InvalidNameError,
    ObjectMissingError,
    PermissionDeniedError,
    TransientStorageError,
)
from storage.manifest import sha256_of_object
from storage.multipart import PART_BYTES
from storage.ranged_reads import read_exactly
from storage.store import Store, open_store
from tests.contract.storage.conftest import s3_options


def test_published_bytes_are_read_back_whole_and_in_ranges(store: Store) -> None:
    data = bytes(range(256)) * 5000
    store.publish("run/a/object", data)
    assert store.read_bytes("run/a/object") == data
    assert store.read_range("run/a/object", 255, 3) == b"\xff\x00\x01"
    assert store.read_range("run/a/object", 0, 0) == b""
    assert store.read_range("run/a/object", len(data) - 2, 10) == data[-2:]
    assert (store.size("run/a/object"), store.exists("run/a/object")) == (len(data), True)


def test_empty_object_is_an_object(store: Store) -> None:
    store.publish("run/empty", b"")
    assert (store.size("run/empty"), store.read_bytes("run/empty")) == (0, b"")


def test_publish_replaces_older_content(store: Store) -> None:
    store.publish("run/object", b"a longer first content")
    store.publish("run/object", b"second")
    assert (store.size("run/object"), store.read_bytes("run/object")) == (6, b"second")


def test_missing_object_is_typed_and_names_the_key(store: Store) -> None:
    assert (store.size("run/none"), store.exists("run/none"), store.delete("run/none")) == (None, False, False)
    for read in (store.read_bytes, store.open_input, lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(ObjectMissingError, match="run/none") as caught:
            read("run/none")
        assert caught.value.key == "run/none"


def test_folder_is_no_object(store: Store) -> None:
    store.publish("run/folder/object", b"x")
    assert (store.size("run/folder"), store.exists("run/folder")) == (None, False)


def test_create_keeps_what_is_there(store: Store) -> None:
    assert store.create("run/once", b"first") is True
    assert store.create("run/once", b"second") is False
    assert store.read_bytes("run/once") == b"first"


def test_create_decides_between_concurrent_writers_where_the_store_says_so(store: Store) -> None:
    if not store.has_conditional_create:
        pytest.skip("this server has no conditional PUT: found by probe")
    with ThreadPoolExecutor(4) as pool:
        created = list(pool.map(lambda number: store.create("run/raced", b"%d" % number), range(8)))
    assert created.count(True) == 1
    assert store.read_bytes("run/raced") == b"%d" % created.index(True)


def test_probe_of_conditional_create_leaves_nothing_behind(store: Store) -> None:
    store.publish("run/x", b"")
    assert store.has_conditional_create in (True, False)
    assert [info.key for info in store.list("")] == ["run/x"]


def test_delete_removes_one_object(store: Store) -> None:
    store.publish("run/a", b"1")
    store.publish("run/ab", b"2")
    assert store.delete("run/a") is True
    assert [info.key for info in store.list("run")] == ["run/ab"]


def test_list_gives_keys_sizes_and_times_below_a_folder_only(store: Store) -> None:
    for key in ("run/b/2", "run/b/1", "run/bb/3", "other/4"):
        store.publish(key, key.encode())
    assert [(info.key, info.size) for info in store.list("run/b")] == [("run/b/1", 7), ("run/b/2", 7)]
    assert [info.key for info in store.list("")] == ["other/4", "run/b/1", "run/b/2", "run/bb/3"]
    assert list(store.list("none")) == []
    assert all(info.modified is not None and info.modified.tzinfo is not None for info in store.list(""))


@pytest.mark.parametrize("num_bytes", [0, 12_800_000, 2 * PART_BYTES + 1], ids=["empty", "at_once", "in_parts"])
def test_file_is_published_and_downloaded_unchanged(store: Store, tmp_path: Path, num_bytes: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(random.Random(0).randbytes(num_bytes))
    store.publish_file("run/file", source)
    store.download("run/file", target)
    expected = hashlib.sha256(source.read_bytes()).hexdigest()
    assert hashlib.sha256(target.read_bytes()).hexdigest() == expected
    assert sha256_of_object(store, "run/file") == expected


def test_opened_object_seeks(store: Store) -> None:
    store.publish("run/o", b"0123456789")
    with store.open_input("run/o") as file:
        assert file.seek(-3, 2) == 7
        assert file.read() == b"789"
        assert file.seek(2) == 2
        assert file.read(3) == b"234"
        assert file.read(100) == b"56789"


def test_short_range_is_refused(store: Store) -> None:
    store.publish("run/o", b"0123")
    with pytest.raises(CorruptObjectError, match="ends at byte 4, but 6 bytes are needed"):
        read_exactly(store, "run/o", 2, 4)


@pytest.mark.parametrize("key", ["", "/abs", "a/../../etc", "a//b", "a/./b", "a\\b", "a\0b", "..", "a/"])
def test_key_that_leaves_the_root_is_refused(store: Store, key: str) -> None:
    for call in (store.read_bytes, store.delete, store.size, lambda name: store.publish(name, b"x")):
        with pytest.raises(InvalidNameError):
            call(key)


def test_write_of_another_client_is_seen_at_once(store: Store, request: pytest.FixtureRequest) -> None:
    if store.url.startswith("s3"):
        kind = request.node.callspec.params["store"].removeprefix("s3-")
        other = open_store(store.url, **s3_options(request.getfixturevalue(f"{kind}_endpoint")))
    else:
        other = open_store(store.url)
    assert store.exists("run/new") is False
    assert list(store.list("run")) == []
    other.publish("run/new", b"1")
    assert store.exists("run/new") is True
    assert [info.key for info in store.list("run")] == ["run/new"]


def test_missing_bucket_is_typed_with_a_remedy(rclone_endpoint: str) -> None:
    store = open_store("s3://nobucket/x", **s3_options(rclone_endpoint))
    for call in (lambda: store.read_bytes("run/k"), lambda: store.publish("run/k", b""), lambda: store.size("run/k")):
        with pytest.raises(BucketMissingError, match="the bucket does not exist; create it or correct"):
            call()


def test_wrong_secret_is_typed_and_not_shown(rclone_endpoint: str) -> None:
    store = open_store("s3://bucket/x", **{**s3_options(rclone_endpoint), "secret": "hush-hush"})
    with pytest.raises(CredentialsError, match="wrong or expired; renew them") as caught:
        store.publish("run/k", b"")
    assert "hush-hush" not in str(caught.value)
    with pytest.raises((CredentialsError, PermissionDeniedError)):
        store.size("run/k")


def test_missing_credentials_are_typed(rclone_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {**s3_options(rclone_endpoint), "key": None, "secret": None}
    with pytest.raises((CredentialsError, PermissionDeniedError), match="credentials"):
        open_store("s3://bucket/x", **options).publish("run/k", b"")


def test_unreachable_server_is_transient() -> None:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    store = open_store("s3://bucket/x", is_retrying=False, **s3_options("http://127.0.0.1:1"))
    with pytest.raises(TransientStorageError, match="may be repeated"):
        store.read_bytes("run/k")


def test_full_disk_is_typed_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from storage.errors import StoreFullError

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = open_store(str(tmp_path / "root"))
    source = tmp_path / "source"
    source.write_bytes(b"x")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StoreFullError, match="no space left; free some"):
        store.publish_file("run/k", source)
    assert list(store.list("")) == []
