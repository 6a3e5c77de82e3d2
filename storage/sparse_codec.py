"""The changed elements of one block of weights as compressed bytes, and back, exactly.

A block is a run of elements of one width (1, 2, 4 or 8 bytes), seen as unsigned integers. A small optimizer step
moves most changed weights by one unit in the last place, so what is stored of an element is the difference of its
bits, modulo 2 to the width, folded so that small steps of either sign are small numbers. Positions are stored as the
gaps between them, one byte each, with an escape for gaps of 255 and more. Gaps, escapes and each byte of the folded
differences are streams of their own, each compressed alone with zstd (layout and codec by measurement, see
``benchmarks/storage``).
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptObjectError

WIDTHS: Final = (1, 2, 4, 8)
"""Bytes of an element that a block can have."""

LEVEL: Final = 1
"""Level of zstd: level 3 saves nothing on such streams, level 9 two percent for ten times the time."""

_ESCAPE: Final = 255
_HEADER: Final = struct.Struct("<QQQB")  # elements, changed elements, escaped gaps, streams
_STREAM: Final = struct.Struct("<Q")  # compressed length

Unsigned = NDArray[np.unsignedinteger]


def encode_block(old: Unsigned, new: Unsigned) -> bytes:
    """Return what turns ``old`` into ``new``; both one-dimensional, of one unsigned type and length."""
    positions = _changed_positions(old, new)
    gaps = np.diff(positions, prepend=-1) - 1
    escaped = gaps[gaps >= _ESCAPE]
    streams = [
        np.minimum(gaps, _ESCAPE).astype(np.uint8).tobytes(),
        escaped.astype("<u8").tobytes(),
        *_planes(_fold(new[positions] - old[positions])),
    ]
    packed = [_compress(stream) for stream in streams]
    head = _HEADER.pack(len(old), len(positions), len(escaped), len(packed))
    return b"".join([head, *(_STREAM.pack(len(stream)) for stream in packed), *packed])


def num_changed(block: bytes | memoryview) -> int:
    """Return how many elements a block changes."""
    return int(_HEADER.unpack_from(block)[1])


def apply_block(values: Unsigned, block: bytes | memoryview) -> None:
    """Turn the base's elements into the new ones, in place.

    Args:
        values: Elements of the base; one-dimensional, writable.
        block: From :func:`encode_block` against exactly these elements.

    Raises:
        CorruptObjectError: The block is damaged or belongs to another number of elements; ``values`` may hold
            anything then.
    """
    try:
        positions, differences = _decode(block, values.dtype.itemsize, len(values))
    except (struct.error, ValueError, OverflowError, OSError) as error:
        message = f"a block of weight changes cannot be read ({error}); take the full weights instead"
        raise CorruptObjectError(message) from error
    values[positions] += differences.astype(values.dtype)


def _decode(block: bytes | memoryview, width: int, num_elements: int) -> tuple[NDArray[np.int64], Unsigned]:
    elements, changed, escapes, num_streams = _HEADER.unpack_from(block)
    if elements != num_elements or changed > elements or escapes > changed or num_streams != 2 + width:
        message = f"it is of {elements} elements with {changed} changes, {num_elements} elements were expected"
        raise ValueError(message)
    sizes = [changed, 8 * escapes, *[changed] * width]
    place = _HEADER.size + _STREAM.size * num_streams
    streams = []
    for number, size in enumerate(sizes):
        (length,) = _STREAM.unpack_from(block, _HEADER.size + _STREAM.size * number)
        streams.append(_decompress(memoryview(block)[place : place + length], size))
        place += length
    if place != len(block):
        message = f"it has {len(block)} bytes, {place} were expected"
        raise ValueError(message)
    positions = _positions(np.frombuffer(streams[0], np.uint8), np.frombuffer(streams[1], "<u8"), num_elements)
    if len(positions) and not 0 <= positions[-1] < num_elements:
        message = f"its last change is at element {positions[-1]} of {num_elements}"
        raise ValueError(message)
    return positions, _unfold(_unplaned(streams[2:], width))


def _positions(gaps: NDArray[np.uint8], escaped: Unsigned, num_elements: int) -> NDArray[np.int64]:
    steps = gaps.astype(np.int64)
    if len(escaped):
        if int(escaped.max()) >= num_elements:
            message = f"a gap of {escaped.max()} elements leaves its {num_elements} elements"
            raise ValueError(message)
        steps[np.flatnonzero(gaps == _ESCAPE)] = escaped.astype(np.int64)
    steps += 1
    np.cumsum(steps, out=steps)
    steps -= 1
    return steps


def _changed_positions(old: Unsigned, new: Unsigned) -> NDArray[np.int64]:
    """Return the indices at which two arrays differ; words of eight bytes are compared first."""
    lanes = 8 // old.dtype.itemsize
    whole = len(old) // lanes * lanes
    old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    places = np.flatnonzero((old_words[words] ^ new_words[words]).view(old.dtype) != 0)
    shift = lanes.bit_length() - 1
    inside = (words[places >> shift] << shift) + (places & (lanes - 1))
    return np.concatenate([inside, whole + np.flatnonzero(old[whole:] != new[whole:])])


def _fold(differences: Unsigned) -> Unsigned:
    """Map 0, -1, 1, -2, 2 ... (modulo 2 to the width) to 0, 1, 2, 3, 4 ..."""
    signed = differences.view(np.dtype(f"i{differences.dtype.itemsize}"))
    bits = 8 * signed.dtype.itemsize
    return ((signed << 1) ^ (signed >> (bits - 1))).view(differences.dtype)


def _unfold(folded: Unsigned) -> Unsigned:
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _planes(values: Unsigned) -> list[bytes]:
    return [(values >> (8 * place)).astype(np.uint8).tobytes() for place in range(values.dtype.itemsize)]


def _unplaned(planes: list[memoryview], width: int) -> Unsigned:
    table = np.empty((len(planes[0]), width), np.uint8)
    for place, plane in enumerate(planes):
        table[:, place] = np.frombuffer(plane, np.uint8)
    return table.view(f"<u{width}")[:, 0]


def _compress(data: bytes) -> bytes:
    import pyarrow as pa

    return bytes(pa.Codec("zstd", LEVEL).compress(data, asbytes=True))


def _decompress(data: memoryview, size: int) -> memoryview:
    import pyarrow as pa

    if size == 0:
        return memoryview(b"")
    return memoryview(pa.Codec("zstd").decompress(pa.py_buffer(data), decompressed_size=size))
