"""The error tree and the mapping of foreign exceptions to it."""

from __future__ import annotations

import errno
import inspect
import pickle

import pytest

from storage import errors
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


class ServiceError(Exception):
    """Shaped like botocore's ClientError."""

    def __init__(self, code: str) -> None:
        super().__init__(f"service said {code}")
        self.response = {"Error": {"Code": code}}


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
        (ServiceError("RequestTimeTooSkewed"), TransientStorageError),
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


def test_clock_skew_is_named_as_a_possible_cause() -> None:
    found = translate(ServiceError("RequestTimeTooSkewed"), "s3://b", "k", "read")
    assert "compare this machine's clock" in str(found)


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
