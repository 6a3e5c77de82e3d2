"""A local cache of what was read of rollouts and column families in other regions: only the ranges that were needed.

Data objects never change (each attempt has keys of its own), so a block that was read once is good for ever; it is kept
under the hash of its address, with a checksum of its own. Manifests and documents are never cached.
"""

from __future__ import annotations

import hashlib
import os
import uuid
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final

from storage.errors import InvalidNameError
from storage.parsed_keys import Kind, parse_key
from storage.ranged_reads import open_ranges
from storage.store import Store

BLOCK_BYTES: Final = 1 << 20
"""Bytes of a cached block."""

MAX_BYTES: Final = 8 << 30
"""Size that the cache is brought back to when it is opened."""

_CHECKSUM_BYTES: Final = 4


class CachingStore:
    """A store whose ranged reads of data objects leave their blocks on this machine's disk."""

    def __init__(self, store: Store, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Put a cache in front of a store.

        Args:
            store: Store of another region.
            folder: Local folder, shared by all processes of this machine.
            max_bytes: The blocks used longest ago go when the cache is opened with more than this.
        """
        self._store, self._folder = store, folder
        _evict(folder, max_bytes)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the methods of a store
        """Everything but ranged reads is the store's own."""
        return getattr(self._store, name)

    def open_input(self, key: str) -> BinaryIO:
        """See :class:`storage.store.Store`."""
        return open_ranges(self, key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See :class:`storage.store.Store`."""
        if not _is_data(key):
            return self._store.read_range(key, start, length)
        first, last = start // BLOCK_BYTES, max(start, start + length - 1) // BLOCK_BYTES
        data = b"".join(self._block(key, number) for number in range(first, last + 1))
        skipped = start - first * BLOCK_BYTES
        return data[skipped : skipped + length]

    def _block(self, key: str, number: int) -> bytes:
        address = hashlib.sha256(f"{self._store.url}/{key}".encode()).hexdigest()
        path = self._folder / address[:2] / f"{address}-{number}"
        found = _read(path)
        if found is None:
            found = self._store.read_range(key, number * BLOCK_BYTES, BLOCK_BYTES)
            _write(path, found)
        return found


def _is_data(key: str) -> bool:
    """Whether it is a shard's data: policies and resume points are fetched whole and kept elsewhere."""
    try:
        parsed = parse_key(key)
    except InvalidNameError:
        return False
    return parsed.is_data and parsed.kind is Kind.SHARD


def _read(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    checksum, data = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    if zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        return None
    os.utime(path)
    return data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_bytes(zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little") + data)
    temporary.replace(path)


def _evict(folder: Path, max_bytes: int) -> None:
    files = []
    for path in folder.glob("*/*"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # another process was quicker
        files.append((found.st_mtime, found.st_size, path))
    excess = sum(size for _, size, _ in files) - max_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
