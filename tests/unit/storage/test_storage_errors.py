"""The error tree and the mapping of foreign exceptions to it."""

from __future__ import annotations

import errno
import inspect
import pickle
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from storage import errors, foreign_errors
from storage.errors import (
    BucketMissingError,
    CredentialsError,
    ObjectMissingError,
    PermissionDeniedError,
    StorageError,
    StoreAccessError,
    StoreFullError,
    TransientStorageError,
)
from storage.foreign_errors import translate, translated
from storage.store import open_store


class ServiceError(Exception):
    """Shaped like botocore's ClientError."""

    def __init__(self, code: str) -> None:
        super().__init__(f"service said {code}")
        self.response: dict[str, object] = {"Error": {"Code": code}}


def test_every_error_has_one_root_and_survives_pickling() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)]
    assert len(classes) == 20
    for cls in classes:
        assert issubclass(cls, StorageError)
        copied = pickle.loads(pickle.dumps(cls("what failed", key="run/k")))
        assert (type(copied), str(copied), copied.key) == (cls, "what failed", "run/k")


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), StoreFullError),
        (OSError(errno.EDQUOT, "quota"), StoreFullError),
        (PermissionError(errno.EACCES, "no"), PermissionDeniedError),
        (OSError(errno.EROFS, "read-only"), PermissionDeniedError),
        (FileNotFoundError(errno.ENOENT, "none"), ObjectMissingError),
        (IsADirectoryError(errno.EISDIR, "folder"), ObjectMissingError),
        (OSError(errno.ESTALE, "stale handle"), TransientStorageError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), TransientStorageError),
        (TimeoutError("slow"), TransientStorageError),
        (ServiceError("SlowDown"), TransientStorageError),
        (ServiceError("503"), TransientStorageError),
        (ServiceError("InternalError"), TransientStorageError),
        (ServiceError("RequestTimeTooSkewed"), StoreAccessError),
        (ServiceError("NoSuchBucket"), BucketMissingError),
        (ServiceError("NoSuchKey"), ObjectMissingError),
        (ServiceError("AccessDenied"), PermissionDeniedError),
        (ServiceError("403"), PermissionDeniedError),
        (ServiceError("ExpiredToken"), CredentialsError),
        (ServiceError("SignatureDoesNotMatch"), CredentialsError),
        (ServiceError("QuotaExceeded"), StoreFullError),
        (ServiceError("SomethingNew"), StoreAccessError),
        (ValueError("unforeseen"), StoreAccessError),
    ],
)
def test_foreign_exception_becomes_the_error_of_who_can_act(foreign: Exception, expected: type[StorageError]) -> None:
    found = translate(foreign, "s3://bucket", "run/k", "read")
    assert type(found) is expected
    assert found.key == "run/k"
    assert str(found).startswith("cannot read s3://bucket/run/k: ")


def test_service_code_is_found_behind_the_os_error_that_wraps_it() -> None:
    def wrapped() -> None:
        try:
            raise ServiceError("NoSuchBucket")
        except ServiceError as error:
            raise FileNotFoundError("bucket") from error

    with pytest.raises(BucketMissingError, match="create it"), translated("s3://b", "k", "write"):
        wrapped()


@pytest.mark.parametrize(
    ("code", "status", "minutes", "expected", "words"),
    [
        ("RequestTimeTooSkewed", 403, 61, StoreAccessError, "this machine's clock is 61 min behind the store's; .*NTP"),
        ("RequestTimeTooSkewed", 403, None, StoreAccessError, "this machine's clock is not the store's; .*NTP"),
        ("AccessDenied", 400, -20, StoreAccessError, "this machine's clock is 20 min ahead of the store's"),
        ("400", 400, 61, StoreAccessError, "61 min behind"),
        ("403", 403, 61, StoreAccessError, "61 min behind"),
        ("AccessDenied", 403, 2, PermissionDeniedError, "grant read, write"),
        ("SignatureDoesNotMatch", 403, None, CredentialsError, "renew them"),
        ("InternalError", 500, 61, TransientStorageError, "try again"),
        ("NoSuchBucket", 404, 61, BucketMissingError, "create it"),
    ],
)
def test_refusal_of_a_store_whose_time_is_another_names_the_clock(
    code: str, status: int, minutes: int | None, expected: type[StorageError], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    here = datetime(2026, 1, 1, 12, tzinfo=UTC)
    monkeypatch.setattr(foreign_errors, "now", lambda: here)
    error = ServiceError(code)
    headers = {} if minutes is None else {"date": format_datetime(here + timedelta(minutes=minutes))}
    error.response["ResponseMetadata"] = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    found = translate(error, "s3://b", "k", "read")
    assert type(found) is expected
    assert re.search(words, str(found))


def test_every_botocore_exception_maps_into_the_tree() -> None:
    exceptions = pytest.importorskip("botocore.exceptions", reason="the s3 extra is not installed")
    classes = [cls for _, cls in inspect.getmembers(exceptions, inspect.isclass) if issubclass(cls, Exception)]
    by_name = {}
    for cls in classes:
        instance = cls.__new__(cls)
        by_name[cls.__name__] = type(translate(instance, "s3://b", "k", "read"))
    assert len(by_name) > 50
    assert by_name["NoCredentialsError"] is CredentialsError
    assert by_name["PartialCredentialsError"] is CredentialsError
    assert by_name["EndpointConnectionError"] is TransientStorageError
    assert by_name["ReadTimeoutError"] is TransientStorageError
    assert by_name["ParamValidationError"] is StoreAccessError


def test_storage_error_and_crash_pass_through_unchanged() -> None:
    original = ObjectMissingError("gone", key="k")
    with pytest.raises(ObjectMissingError) as caught, translated("s3://b", "k", "read"):
        raise original
    assert caught.value is original
    with pytest.raises(KeyboardInterrupt), translated("s3://b", "k", "read"):
        raise KeyboardInterrupt


_FULL_DISK = """
import resource, sys
from storage.errors import StoreFullError
from storage.policies import head_version, publish_policy, resolve_policy
from storage.store import open_store
from tests.helpers.storage_builders import RUN, policy_files, safetensors_bytes

store = open_store(sys.argv[1])
publish_policy(store, RUN, 0, policy_files(0), created_by="test")
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    files = {**policy_files(1), "model.safetensors": safetensors_bytes({"w": [1] * 20_000})}
    publish_policy(store, RUN, 1, files, created_by="test")
except StoreFullError as error:
    print(error)
print(head_version(store, RUN), resolve_policy(store, RUN).version)
print([info.key for info in store.list(RUN) if ".tmp-" in info.key])
"""


def test_full_disk_is_named_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The file-size limit of the process stands for a full disk: the kernel refuses a write in the middle of a file."""
    done = subprocess.run([sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    message, versions, left = done.stdout.splitlines()
    assert "no space left; free some or choose another storage root" in message
    assert f"file://{tmp_path}/run-1/policies/1/" in message
    assert (versions, left) == ("0 0", "[]")


@pytest.mark.parametrize("place", ["file/store", "file"])
def test_root_that_can_be_no_folder_is_named_as_such(tmp_path: Path, place: str) -> None:
    """Writing to what can't be a folder is no missing object: an operator must choose another root."""
    (tmp_path / "file").touch()
    store = open_store(str(tmp_path / place))
    with pytest.raises(StoreAccessError, match="its folder can't be made there; choose another storage root"):
        store.publish("run/run.json", b"{}")
    assert (store.exists("run/run.json"), list(store.list("run"))) == (False, [])
