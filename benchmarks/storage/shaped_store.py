"""A store behind an emulated link: a delay for every request and a rate for all of them together."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from storage.store import Store


class ShapedStore:
    """Reads of another store as if it were far away; costs waiting and hardly any CPU."""

    def __init__(self, store: Store, *, bytes_per_s: float, delay_s: float) -> None:
        """Put a link in front of a store.

        Args:
            store: The store at the far end.
            bytes_per_s: Rate of the link, for all requests together.
            delay_s: One-way delay.
        """
        self._store, self._bytes_per_s, self._delay_s = store, bytes_per_s, delay_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.num_bytes = 0
        """Bytes that came over the link."""

    def __getattr__(self, name: str) -> object:
        """Everything else is the far store's own."""
        return getattr(self._store, name)

    def local_path(self, key: str) -> Path | None:
        """Nothing far away is a local file."""
        del key
        return None

    def read_bytes(self, key: str) -> bytes:
        """See :class:`storage.store.Store`."""
        return self._arrived(self._store.read_bytes(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See :class:`storage.store.Store`."""
        return self._arrived(self._store.read_range(key, start, length))

    def size(self, key: str) -> int | None:
        """See :class:`storage.store.Store`."""
        self._arrived(b"")
        return self._store.size(key)

    def _arrived(self, data: bytes) -> bytes:
        with self._lock:
            start = max(time.monotonic() + self._delay_s, self._free_at)
            self._free_at = start + len(data) / self._bytes_per_s
            due = self._free_at + self._delay_s
            self.num_bytes += len(data)
        time.sleep(max(0.0, due - time.monotonic()))
        return data
