"""Mapping of foreign exceptions (operating system, fsspec, botocore) to the storage error tree."""

from __future__ import annotations

import asyncio
import errno
import http.client
from collections.abc import Iterator
from contextlib import contextmanager

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
    | {"ServiceUnavailable", "RequestTimeout", "RequestTimeTooSkewed", "OperationAborted", "500", "502", "503", "504"}
    | {"429", "408", "IncompleteBody", "BadDigest"}
)
_CREDENTIAL_CODES = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthFailure"}
    | {"TokenRefreshRequired", "MissingSecurityHeader", "InvalidSecurity", "401", "AuthorizationHeaderMalformed"}
)
_DENIED_CODES = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "MethodNotAllowed"})
_MISSING_CODES = frozenset({"NoSuchKey", "404", "NotFound"})
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

_CLOCK = " (if this repeats, compare this machine's clock with the store's: more than 15 minutes apart is refused)"


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


def translate(error: BaseException, url: str, key: str, action: str) -> StorageError:
    """Return the storage error that stands for a foreign exception."""
    where = f"cannot {action} {url}/{key}"
    code = _service_code(error)
    kind, advice = _classify(error, code)
    if kind is ObjectMissingError and action == "write":
        kind, advice = StoreAccessError, "its folder can't be made there; choose another storage root"
    shown = f"{type(error).__name__}{f' {code}' if code else ''}: {error}"
    return kind(f"{where}: {advice} [{shown}]", key=key)


def _service_code(error: BaseException) -> str | None:
    """Return the code of the S3 error that is, or caused, the exception."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            code = response["Error"].get("Code")
            return str(code) if code is not None else None
        seen = seen.__cause__ or seen.__context__
    return None


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
        clock = _CLOCK if code == "RequestTimeTooSkewed" else ""
        return TransientStorageError, f"the store asks to try again{clock}"
    return None
