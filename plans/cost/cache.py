"""A cache that is emptied when full: bounded memory without bookkeeping per read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


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
