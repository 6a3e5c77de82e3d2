"""A rate limit on what a process moves over one link: a store wrapper for the store at its far end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from storage.ranged_reads import open_ranges
from storage.store import Store


class RateLimiter:
    """Lets bytes through at a mean rate, for all threads together."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start with an idle link.

        Args:
            bytes_per_s: Mean rate (> 0).
            now: Monotonic clock, seconds; injected by tests.
            sleep: Waits that many seconds.
        """
        self._bytes_per_s, self._now, self._sleep = bytes_per_s, now, sleep
        self._lock = threading.Lock()
        self._free_at = now()

    def take(self, num_bytes: int) -> None:
        """Wait until the link has room for that many bytes."""
        with self._lock:
            start = max(self._now(), self._free_at)
            self._free_at = start + num_bytes / self._bytes_per_s
        if (delay := start - self._now()) > 0:
            self._sleep(delay)


class RateLimitedStore:
    """A store of another region whose objects come and go at a limited rate."""

    def __init__(self, store: Store, limiter: RateLimiter) -> None:
        """Put a limit in front of a store.

        Args:
            store: The store at the far end of the link.
            limiter: The limit; one for all stores behind the same link.
        """
        self._store, self._limiter = store, limiter

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the methods of a store
        """Everything that moves no object's content is the store's own."""
        return getattr(self._store, name)

    def read_bytes(self, key: str) -> bytes:
        """See :class:`storage.store.Store`; a whole object is small, and counted when its length is known."""
        data = self._store.read_bytes(key)
        self._limiter.take(len(data))
        return data

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See :class:`storage.store.Store`."""
        self._limiter.take(length)
        return self._store.read_range(key, start, length)

    def open_input(self, key: str) -> BinaryIO:
        """See :class:`storage.store.Store`."""
        return open_ranges(self, key)

    def download(self, key: str, path: Path) -> None:
        """See :class:`storage.store.Store`."""
        self._limiter.take(self._store.size(key) or 0)
        self._store.download(key, path)

    def publish(self, key: str, data: bytes) -> None:
        """See :class:`storage.store.Store`."""
        self._limiter.take(len(data))
        self._store.publish(key, data)

    def publish_file(self, key: str, path: Path) -> None:
        """See :class:`storage.store.Store`."""
        self._limiter.take(path.stat().st_size)
        self._store.publish_file(key, path)

    def create(self, key: str, data: bytes) -> bool:
        """See :class:`storage.store.Store`."""
        self._limiter.take(len(data))
        return self._store.create(key, data)
