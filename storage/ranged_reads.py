"""Seekable reading of an object through ranged reads of its store, so failures are typed and repeatable."""

from __future__ import annotations

import io
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from typing_extensions import Buffer

from storage.errors import CorruptObjectError, ObjectMissingError

if TYPE_CHECKING:
    from storage.store import Store

COPY_BYTES: Final = 8 << 20
"""Bytes held at once while an object is streamed into a file."""


class _RangeReader(io.RawIOBase):
    """A seekable file whose every read is one ranged read of a store, so its failures are typed and repeatable."""

    def __init__(self, store: Store, key: str, size: int | None) -> None:
        """Look up the object's length if need be. Raises ``ObjectMissingError`` if there is no such object."""
        super().__init__()
        size = store.size(key) if size is None else size
        if size is None:
            message = f"cannot read {store.url}/{key}: there is no such object"
            raise ObjectMissingError(message, key=key)
        self._store, self._key, self._size, self._place = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._place))
        data = read_exactly(self._store, self._key, self._place, wanted)
        view[:wanted] = data
        self._place += wanted
        return wanted


def open_ranges(store: Store, key: str, *, size: int | None = None) -> BinaryIO:
    """Open an object for seeking reads through ``store.read_range``; small reads are buffered.

    Args:
        store: Where it lies.
        key: Object key.
        size: Its length in bytes, if that is known: over a link, asking takes as long as reading.

    Raises:
        ObjectMissingError: There is no such object; with a size, reading says so.
    """
    return io.BufferedReader(_RangeReader(store, key, size), buffer_size=1 << 20)


def download_ranges(store: Store, key: str, path: Path) -> None:
    """Write an object to a local file through ``store.read_range``.

    Raises:
        ObjectMissingError: There is no such object.
    """
    with closing(open_ranges(store, key)) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, COPY_BYTES)


def read_exactly(store: Store, key: str, start: int, length: int) -> bytes:
    """Read a range and refuse a short answer.

    Raises:
        CorruptObjectError: The object ends before ``start + length``.
    """
    data = store.read_range(key, start, length)
    if len(data) != length:
        message = f"{store.url}/{key} ends at byte {start + len(data)}, but {start + length} bytes are needed"
        raise CorruptObjectError(message, key=key)
    return data
