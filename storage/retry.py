"""The single place of storage that repeats a call: a store wrapper for transient errors.

Clients of stores are told not to repeat anything (``storage.s3_store``). Airflow repeats whole tasks; it must not
repeat what was repeated here already, so after the last try the error that leaves is the original
:class:`storage.errors.TransientStorageError`, with how often and how long the store was asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import tenacity

from storage.errors import TransientStorageError
from storage.foreign_errors import translated
from storage.multipart import MultipartStore, upload_file
from storage.ranged_reads import download_ranges, open_ranges
from storage.store import ObjectInfo, Store

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often and how long to try."""

    max_tries: int = 6
    """Calls in all, the first included (>= 1)."""
    first_wait_s: float = 0.2
    """Upper bound of the wait before the second try, seconds; doubles with every try."""
    max_wait_s: float = 5.0
    """Upper bound of any single wait, seconds."""
    patience_s: float = 30.0
    """Seconds after the first call's begin from which on only a second call is made, and no third: a peer that is
    silent until each call's own timeout (``storage.s3_store``) costs two of those."""


class RetryingStore:
    """A store that repeats transient failures of another store, with exponential backoff and full jitter."""

    def __init__(
        self, store: Store, policy: RetryPolicy | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Wrap a store.

        Args:
            store: The store whose calls are repeated.
            policy: How often and how long; the default tries 6 times within 3 seconds on average if answers are quick.
            sleep: Waits that many seconds; injected by tests.
        """
        self._store = store
        self._policy = policy or RetryPolicy()
        self._sleep = sleep

    def _call(self, function: Callable[..., Result], *arguments: object) -> Result:
        policy = self._policy
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientStorageError),
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(policy.max_tries),
                tenacity.stop_all(tenacity.stop_after_attempt(2), tenacity.stop_after_delay(policy.patience_s)),
            ),
            wait=tenacity.wait_random_exponential(multiplier=policy.first_wait_s, max=policy.max_wait_s),
            sleep=self._sleep,
            retry_error_callback=_give_up,
        )
        return retrying(function, *arguments)

    @property
    def url(self) -> str:
        """URL of the wrapped store."""
        return self._store.url

    @property
    def has_conditional_create(self) -> bool:
        """Whether the wrapped store decides between concurrent creators."""
        return self._call(lambda: self._store.has_conditional_create)

    def read_bytes(self, key: str) -> bytes:
        """See :class:`storage.store.Store`."""
        return self._call(self._store.read_bytes, key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See :class:`storage.store.Store`."""
        return self._call(self._store.read_range, key, start, length)

    def size(self, key: str) -> int | None:
        """See :class:`storage.store.Store`."""
        return self._call(self._store.size, key)

    def exists(self, key: str) -> bool:
        """See :class:`storage.store.Store`."""
        return self._call(self._store.exists, key)

    def publish(self, key: str, data: bytes) -> None:
        """See :class:`storage.store.Store`."""
        self._call(self._store.publish, key, data)

    def publish_file(self, key: str, path: Path) -> None:
        """See :class:`storage.store.Store`; every part of a large file is repeated by itself."""
        if isinstance(self._store, MultipartStore):
            with translated(self.url, key, "write"):
                upload_file(self._store, key, path, self._call)
        else:
            self._call(self._store.publish_file, key, path)

    def create(self, key: str, data: bytes) -> bool:
        """See :class:`storage.store.Store`; a try that failed after its write is recognised by its content."""
        tries = 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            if self._store.create(key, data):
                return True
            return tries > 1 and self._store.read_bytes(key) == data

        return self._call(attempt)

    def download(self, key: str, path: Path) -> None:
        """See :class:`storage.store.Store`; every read of a remote object is repeated by itself."""
        if self._store.local_path(key) is not None:
            self._call(self._store.download, key, path)
        else:
            with translated(self.url, key, "read"):
                download_ranges(self, key, path)

    def open_input(self, key: str) -> BinaryIO:
        """See :class:`storage.store.Store`; every read of a remote object is repeated by itself."""
        if self._store.local_path(key) is not None:
            return self._call(self._store.open_input, key)
        return open_ranges(self, key)

    def delete(self, key: str) -> bool:
        """See :class:`storage.store.Store`; a repeated delete may answer ``False`` for what it removed itself."""
        return self._call(self._store.delete, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`storage.store.Store`."""
        yield from self._call(lambda: [*self._store.list(prefix)])

    def local_path(self, key: str) -> Path | None:
        """See :class:`storage.store.Store`."""
        return self._store.local_path(key)


def _give_up(state: tenacity.RetryCallState) -> NoReturn:
    """Raise the last try's error, with how often and how long the store was asked."""
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, TransientStorageError):
        message = "a call was given up that did not fail transiently"
        raise TypeError(message)
    asked = f"asked {state.attempt_number} times within {state.seconds_since_start or 0:.1f} s"
    raise type(error)(f"{error}; {asked}", key=error.key) from error
