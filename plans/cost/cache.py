"""A cache that is emptied when full: bounded memory without bookkeeping per read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")

#: Entries that a cache of placements keeps on a small cluster, and GPU slots that it keeps on a large one.
MOST_ENTRIES = 50_000
MOST_GPU_SLOTS = 4_000_000


def entries_for(num_gpus: int) -> int:
    """Return how many placements of a cluster to keep, so that large ones do not fill the memory."""
    return max(500, min(MOST_ENTRIES, MOST_GPU_SLOTS // num_gpus))


class BoundedCache(Generic[KeyT, ValueT]):
    """Values by key; `get` is the dictionary's own."""

    __slots__ = ("_entries", "_limit", "get")

    def __init__(self, limit: int) -> None:
        self._entries: dict[KeyT, ValueT] = {}
        self._limit = limit
        self.get = self._entries.get

    def put(self, key: KeyT, value: ValueT) -> None:
        """Store a value; empty the cache first when it is full."""
        if len(self._entries) >= self._limit:
            self._entries.clear()
        self._entries[key] = value
