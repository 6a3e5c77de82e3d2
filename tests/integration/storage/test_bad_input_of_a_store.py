"""What is said when a real S3 server can't be used: what, where and what to do; and nothing is left half done."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage import foreign_errors
from storage.errors import (
    BucketMissingError,
    CredentialsError,
    PermissionDeniedError,
    StorageError,
    StoreAccessError,
    TransientStorageError,
)
from storage.policies import head_version, publish_policy
from storage.store import Store, open_store
from tests.helpers.s3_server import S3Server, s3_server
from tests.helpers.storage_builders import RUN, policy_files

pytestmark = pytest.mark.timeout(1800)

BUCKET, KEY = "rl", "run/a"
CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read_bytes(KEY),
    "look up": lambda store: store.size(KEY),
    "write": lambda store: store.publish("run/b", b"new"),
    "list": lambda store: [*store.list("run")],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), BUCKET) as found:
        opened(found).publish(KEY, b"content")
        yield found


def opened(server: S3Server, url: str = f"s3://{BUCKET}/root", **options: Any) -> Store:
    """Open the store with a client of its own: fsspec would hand out the one with other credentials."""
    return open_store(url, skip_instance_cache=True, **{**server.options(), **options})


def told(store: Store, action: str) -> StorageError:
    """Return the error of a call, which must name action, place and remedy and no secret."""
    with pytest.raises(StorageError) as caught:
        CALLS[action](store)
    assert str(caught.value).startswith(f"cannot {action} {store.url}/run")
    assert "secret-" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("action", CALLS)
@pytest.mark.parametrize("wrong", [{"secret": "guess"}, {"key": "nobody"}], ids=["secret", "key"])
def test_wrong_credentials(server: S3Server, action: str, wrong: dict[str, str]) -> None:
    error = told(opened(server, **wrong), action)
    # An answer to a request without a body (HEAD) says 403 and nothing more.
    assert isinstance(error, CredentialsError | PermissionDeniedError)
    assert "the credentials are wrong or" in str(error)


@pytest.mark.parametrize("action", CALLS)
def test_missing_credentials(server: S3Server, action: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    error = told(opened(server, key=None, secret=None), action)
    assert isinstance(error, CredentialsError)
    assert "set them in the environment or in the store's options" in str(error)


@pytest.mark.parametrize("action", CALLS)
def test_missing_bucket(server: S3Server, action: str) -> None:
    error = told(opened(server, "s3://nowhere/root"), action)
    assert isinstance(error, BucketMissingError)
    assert "the bucket does not exist; create it or correct the storage root" in str(error)


@pytest.mark.parametrize("action", CALLS)
@pytest.mark.parametrize("minutes", [-60, 60])
def test_clock_of_this_machine_is_wrong(
    server: S3Server, action: str, minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    botocore_auth = pytest.importorskip("botocore.auth")
    signing, ours, wrong = botocore_auth.get_current_datetime, foreign_errors.now, timedelta(minutes=minutes)
    monkeypatch.setattr(botocore_auth, "get_current_datetime", lambda *a, **k: signing(*a, **k) + wrong)
    monkeypatch.setattr(foreign_errors, "now", lambda: ours() + wrong)
    error = told(opened(server), action)
    assert type(error) is StoreAccessError  # nothing that is repeated
    way = "behind" if minutes < 0 else "ahead of"
    assert re.search(
        rf"this machine's clock is (59|60|61) min {way} the store's; .*set this machine's clock", str(error)
    )


def test_full_disk_of_the_server_leaves_nothing_visible(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this process may not mount a small disk")
    try:
        with s3_server(disk / "s3", BUCKET) as full:
            store = opened(full)
            files = policy_files(0)
            publish_policy(store, RUN, 0, files, created_by="t")
            large = {**policy_files(1), "tokenizer.json": b"x" * (2 << 20)}
            with pytest.raises(TransientStorageError, match="its disk may be full"):
                publish_policy(store, RUN, 1, large, created_by="t")
            assert head_version(store, RUN) == 0
            assert all(info.size < 2 << 20 for info in store.list(RUN))
            publish_policy(store, RUN, 1, policy_files(1), created_by="t")  # there is room again
            assert head_version(store, RUN) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=False, capture_output=True)
