"""Mapping of foreign exceptions (operating system, fsspec, botocore) to the storage error tree."""

from __future__ import annotations

import asyncio
import errno
import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

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

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_TRANSIENT = frozenset(
    {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.ECONNREFUSED}
    | {errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET}
)
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "InternalError"}
    | {"ServiceUnavailable", "RequestTimeout", "OperationAborted", "500", "502", "503", "504"}
    | {"429", "408", "IncompleteBody", "BadDigest"}
)
_CREDENTIAL_CODES = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthFailure"}
    | {"TokenRefreshRequired", "MissingSecurityHeader", "InvalidSecurity", "401", "AuthorizationHeaderMalformed"}
)
_DENIED_CODES = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "MethodNotAllowed"})
_MISSING_CODES = frozenset({"NoSuchKey", "404", "NotFound"})
_SKEWED = "RequestTimeTooSkewed"
_FULL_CODES = frozenset({"QuotaExceeded", "InsufficientStorage", "507", "EntityTooLarge"})
_CREDENTIAL_CLASSES = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
    | {"TokenRetrievalError", "UnauthorizedSSOTokenError", "DefaultCredentialsError", "ClientAuthenticationError"}
)
_TRANSIENT_CLASSES = frozenset(
    {"EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError", "HTTPClientError"}
    | {"ClientConnectorError", "ServerDisconnectedError", "ClientPayloadError", "ServerTimeoutError"}
    | {"ResponseStreamingError", "IncompleteReadError", "ClientOSError", "HttpError", "ProxyConnectionError"}
)

_REFUSALS = frozenset({400, 401, 403})
"""Statuses with which servers answer a request whose signature has another time than theirs."""

CLOCK_TOLERANCE_S = 300.0
"""Seconds between this machine's clock and the store's below which the clock is not held to be why it refuses."""

now: Callable[[], datetime] = lambda: datetime.now(UTC)  # noqa: E731
"""Clock; replaced by tests."""


@contextmanager
def translated(url: str, key: str, action: str) -> Iterator[None]:
    """Turn foreign exceptions raised inside the block into storage errors.

    Args:
        url: Root of the store, for the message.
        key: Object key.
        action: Verb for the message: read, write, delete, list, look up.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # the one adapter between foreign exceptions and the tree
        raise translate(error, url, key, action) from error


@contextmanager
def on_this_machine(path: Path) -> Iterator[None]:
    """Turn what the operating system says of local files inside the block into storage errors.

    Args:
        path: What is written, for the message.
    """
    try:
        yield
    except OSError as error:
        raise translate(error, f"file://{path.parent}", path.name, "write") from error


def translate(error: BaseException, url: str, key: str, action: str) -> StorageError:
    """Return the storage error that stands for a foreign exception."""
    where = f"cannot {action} {url}/{key}"
    response = _service_response(error)
    code = _service_code(response)
    skew = _clock_skew(response, code)
    kind, advice = skew if skew is not None else _classify(error, code)
    if kind is ObjectMissingError and action == "write":
        kind, advice = StoreAccessError, "its folder can't be made there; choose another storage root"
    shown = f"{type(error).__name__}{f' {code}' if code else ''}: {error}"
    return kind(f"{where}: {advice} [{shown}]", key=key)


def _service_response(error: BaseException) -> dict[str, Any]:
    """Return botocore's document of the S3 answer that is, or caused, the exception; empty if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            return response
        seen = seen.__cause__ or seen.__context__
    return {}


def _service_code(response: dict[str, Any]) -> str | None:
    code = response.get("Error", {}).get("Code")
    return None if code is None else str(code)


def _clock_skew(response: dict[str, Any], code: str | None) -> tuple[type[StorageError], str] | None:
    """Return class and advice where a store refuses a request because this machine's clock is wrong.

    Servers say so in many ways (Amazon: RequestTimeTooSkewed; rclone: AccessDenied, or 400 without a word), but all
    answers carry the server's time.
    """
    remedy = "stores refuse requests whose time is minutes from theirs; set this machine's clock (NTP)"
    facts = response.get("ResponseMetadata", {})
    is_refusal = code == _SKEWED or facts.get("HTTPStatusCode") in _REFUSALS
    behind_s = _seconds_behind(facts.get("HTTPHeaders", {}).get("date")) if is_refusal else 0.0
    if abs(behind_s) > CLOCK_TOLERANCE_S:
        way = "behind" if behind_s > 0 else "ahead of"
        return StoreAccessError, f"this machine's clock is {abs(behind_s) / 60:.0f} min {way} the store's; {remedy}"
    if code == _SKEWED:
        return StoreAccessError, f"this machine's clock is not the store's; {remedy}"
    return None


def _seconds_behind(date: str | None) -> float:
    """Return how far this machine's clock is behind the one of an answer; 0 where the answer has no time."""
    try:
        return (parsedate_to_datetime(date or "") - now()).total_seconds()
    except (TypeError, ValueError):  # no date, or one without a zone
        return 0.0


def _classify(error: BaseException, code: str | None) -> tuple[type[StorageError], str]:
    by_code = _classify_code(code) if code else None
    if by_code is not None:
        return by_code
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _CREDENTIAL_CLASSES:
        return CredentialsError, "no usable credentials; set them in the environment or in the store's options"
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return StoreFullError, "no space left; free some or choose another storage root"
    if number in _DENIED or isinstance(error, PermissionError):
        return PermissionDeniedError, "permission denied; give this user write and read access or choose another root"
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) or number in _MISSING:
        return ObjectMissingError, "there is no such object"
    timeouts = TimeoutError | ConnectionError | asyncio.TimeoutError | http.client.HTTPException
    if isinstance(error, timeouts) or number in _TRANSIENT or names & _TRANSIENT_CLASSES:
        return TransientStorageError, "the store did not answer in time; the call may be repeated"
    return StoreAccessError, "the store failed in a way that repeating will not cure; see the cause"


def _classify_code(code: str) -> tuple[type[StorageError], str] | None:
    if code == "NoSuchBucket":
        return BucketMissingError, "the bucket does not exist; create it or correct the storage root in the job"
    if code in _CREDENTIAL_CODES:
        return CredentialsError, "the credentials are wrong or expired; renew them in the environment"
    if code in _DENIED_CODES:
        return PermissionDeniedError, "the credentials are wrong or may not do this; grant read, write, list and delete"
    if code in _MISSING_CODES:
        return ObjectMissingError, "there is no such object"
    if code in _FULL_CODES:
        return StoreFullError, "the store's quota is used up; free space or raise it"
    if code in _TRANSIENT_CODES:
        advice = "the store asks to try again; if that repeats, look at the store itself (its disk may be full)"
        return TransientStorageError, advice
    return None
