"""The data of a safetensors file as blocks of elements of one width, read from any thread."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptObjectError
from storage.sparse_codec import WIDTHS, Unsigned
from storage.weights_hash import TensorEntry, element_bits, read_header


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """A run of elements in a file."""

    start: int
    """First byte, counted from the start of the file."""
    length: int
    """Length in bytes, a multiple of the width."""
    width: int
    """Bytes of an element."""


class WeightsFile:
    """A safetensors file, on disk or in memory, opened for reading."""

    def __init__(self, source: bytes | Path, name: str) -> None:
        """Open the file and read its header.

        Args:
            source: Path or content.
            name: File name, for messages.

        Raises:
            CorruptObjectError: Truncated or malformed.
        """
        file = source.open("rb", buffering=0) if isinstance(source, Path) else io.BytesIO(source)
        with ExitStack() as opened:
            opened.enter_context(file)
            self._fd = file.fileno() if isinstance(file, io.FileIO) else None
            self._memory = memoryview(b"" if isinstance(source, Path) else source)
            self.size = file.seek(0, io.SEEK_END)
            """Length in bytes."""
            self.entries = read_header(file, self.size, name)
            """Its tensors, in the order of their bytes."""
            self.head = bytearray(min((entry.start for entry in self.entries), default=self.size))
            """The bytes before the tensors."""
            self._fill(memoryview(self.head), 0)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        """Keep it open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._opened.close()

    def read(self, block: WeightBlock, buffer: NDArray[np.uint8]) -> Unsigned:
        """Read a block into a buffer, which is at least as long, and return it as elements.

        Raises:
            CorruptObjectError: The file ends before.
        """
        values = buffer[: block.length].view(f"u{block.width}")
        self._fill(values.data.cast("B"), block.start)
        return values

    def _fill(self, view: memoryview, start: int) -> None:
        place = 0
        while place < len(view):
            count = self._read_some(view[place:], start + place)
            if not count:
                raise CorruptObjectError(f"a file of weights ends at byte {start + place}; it is truncated")
            place += count

    def _read_some(self, view: memoryview, start: int) -> int:
        if self._fd is not None:
            return os.preadv(self._fd, [view], start)
        data = self._memory[start : start + len(view)]
        view[: len(data)] = data
        return len(data)


def weight_blocks(entries: Sequence[TensorEntry], block_bytes: int) -> Iterator[WeightBlock]:
    """Yield the blocks of a file's data: neighbouring tensors of one width together, cut at the block size.

    Args:
        entries: Tensors, in the order of their bytes.
        block_bytes: Largest length of a block, a multiple of 8.
    """
    place = 0
    while place < len(entries):
        width, start, end = _width(entries[place]), entries[place].start, entries[place].start
        while place < len(entries) and _width(entries[place]) == width:
            end = entries[place].start + entries[place].length
            place += 1
        for begin in range(start, end, block_bytes):
            yield WeightBlock(begin, min(block_bytes, end - begin), width)


def _width(entry: TensorEntry) -> int:
    bits = element_bits(entry.dtype)
    return bits // 8 if bits is not None and bits % 8 == 0 and bits // 8 in WIDTHS else 1
