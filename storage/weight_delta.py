"""The difference between two versions of a model's safetensors files as one object, exact to the byte.

A delta belongs to one base (by the hash of its tensors) and gives one result. It is made from serving-format files,
never from a trainer's own layout (W17), and only for files whose headers are equal byte for byte. Layout::

    "MTLDELTA"  u64 length of the header   header (zstd JSON)   block  block ...

Blocks (``storage.sparse_codec``) cover the files' data in order, so that one block of base, changes and result is all
that memory holds. The header names every tensor of the result, unchanged ones included, by its SHA-256 (which together
give the version's hash) and by its BLAKE3, found from the same bytes: whoever applies a chain of deltas proves every
byte that comes out by the latter, whatever the base and the changes were.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from storage.background import BLOCKS_IN_FLIGHT, InBackground
from storage.errors import CorruptObjectError, DeltaMismatchError
from storage.sparse_codec import WIDTHS, Unsigned, apply_block, encode_block
from storage.tensor_proof import TensorProofs
from storage.weights_hash import TensorEntry, combined_hash, element_bits, read_header

DELTA_FORMAT: Final = "motley.weight_delta/2"
BLOCK_BYTES: Final = 4 << 20
"""Bytes of weights per block: small enough for a cache, large enough that zstd sees enough of the changes."""
MAX_FRACTION: Final = 0.5
"""Size of a delta, relative to its files, from which on it is not worth having."""

_MAGIC: Final = b"MTLDELTA"
_MAX_HEADER_BYTES: Final = 256 << 20
_MAX_BLOCK_BYTES: Final = 256 << 20
_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """What a delta says of one safetensors file."""

    name: str
    """File name inside the policy."""
    size: int
    """Length in bytes, of base and result."""
    header_sha256: str
    """SHA-256 (hex) of the bytes before the tensors, in base and result."""
    blocks: tuple[int, ...]
    """Lengths of the compressed blocks."""


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """A parsed delta: its header, and where its blocks lie."""

    base_weights_hash: str
    """Hash of the tensors that it starts from."""
    weights_hash: str
    """Hash of the tensors that it gives."""
    block_bytes: int
    """Bytes of weights per block."""
    files: tuple[DeltaFile, ...]
    """Files, in the order of the blocks."""
    digests: Mapping[str, str]
    """SHA-256 (hex) of each tensor of the result."""
    proofs: Mapping[str, str]
    """BLAKE3 (hex) of each tensor of the result (``storage.tensor_proof``)."""
    body: memoryview
    """All blocks, one after the other."""
    wait_for: Callable[[int], None]
    """Returns once that many bytes of the body are there."""

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yield the blocks of one file, each once it is there."""
        place = 0
        for file in self.files:
            for length in file.blocks:
                if file.name == name:
                    self.wait_for(place + length)
                    yield self.body[place : place + length]
                place += length


def encode_delta(
    base: Mapping[str, bytes | Path],
    new: Mapping[str, bytes | Path],
    *,
    base_weights_hash: str,
    digests: Mapping[str, str],
    block_bytes: int = BLOCK_BYTES,
) -> bytes | None:
    """Return the delta from one version's files to the next one's, ``None`` where the full files are the better choice.

    Args:
        base: Files of the base by name; other files than safetensors are ignored.
        new: Files of the result.
        base_weights_hash: Hash of the base's tensors.
        digests: SHA-256 of the result's tensors, from ``weights_hash.tensor_digests``.
        block_bytes: Bytes of weights per block, a multiple of 8.

    Raises:
        CorruptObjectError: A file is truncated or malformed.
    """
    names = [name for name in sorted(new) if name.endswith(_SUFFIX)]
    if names != [name for name in sorted(base) if name.endswith(_SUFFIX)]:
        return None
    files, blocks, proofs = [], list[bytes](), dict[str, str]()
    room = int(MAX_FRACTION * sum(_size(new[name]) for name in names))
    for name in names:
        with _opened(base[name]) as old_file, _opened(new[name]) as new_file:
            old_head, new_head = (_head(file, name) for file in (old_file, new_file))
            if old_head.raw != new_head.raw or old_head.size != new_head.size:
                return None
            proving = TensorProofs(new_head.entries, name)
            found = _encoded_blocks(old_file, new_file, new_head, block_bytes, proving, room)
        if found is None:
            return None
        room -= sum(map(len, found))
        blocks += found
        proofs |= proving.found
        files.append(_file_document(name, new_head, [len(block) for block in found]))
    header = {
        "format": DELTA_FORMAT,
        "base_weights_hash": base_weights_hash,
        "weights_hash": combined_hash(digests),
        "block_bytes": block_bytes,
        "files": files,
        "digests": dict(digests),
        "proofs": proofs,
    }
    packed = _packed_json(header)
    return b"".join([_MAGIC, len(packed).to_bytes(8, "little"), packed, *blocks])


def _encoded_blocks(
    old_file: Any,  # noqa: ANN401 - raw files and memory
    new_file: Any,  # noqa: ANN401
    head: _Head,
    block_bytes: int,
    proofs: TensorProofs,
    room: int,
) -> list[bytes] | None:
    """Return the blocks of one file, its tensors proved on the way; ``None`` when they take more than ``room``."""
    old, buffers = np.empty(block_bytes, np.uint8), _Buffers(block_bytes)
    blocks, size = [], 0
    with InBackground(proofs.update) as proving:
        for segment in _segments(head.entries, block_bytes):
            values = _read(new_file, segment, buffers.next())
            proving.give(values.data.cast("B"))
            blocks.append(encode_block(_read(old_file, segment, old), values))
            size += len(blocks[-1])
            if size > room:
                return None
    proofs.finish()
    return blocks


def all_there(_: int) -> None:
    """Say that nothing of a delta is still to come."""


def parse_delta(data: bytes | memoryview, name: str, wait_for: Callable[[int], None] = all_there) -> WeightDelta:
    """Read a delta's header and check that there is room for its blocks.

    Args:
        data: The whole object, of which an end may still be to come.
        name: Object key, for messages.
        wait_for: Returns once that many bytes of the object are there.

    Raises:
        CorruptObjectError: Truncated, damaged, or of a format that this code does not know.
    """
    try:
        delta = _parsed(memoryview(data), wait_for)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        message = f"{name} is no usable weight delta ({error!r}); take the full weights instead"
        raise CorruptObjectError(message, key=name) from error
    return delta


def _parsed(view: memoryview, wait_for: Callable[[int], None]) -> WeightDelta:
    """Raises ValueError, KeyError, TypeError, AttributeError or OSError on damage."""
    wait_for(min(16, len(view)))
    if bytes(view[:8]) != _MAGIC:
        message = "it does not start as a delta does"
        raise ValueError(message)
    length = int.from_bytes(view[8:16], "little")
    wait_for(min(16 + length, len(view)))
    header = _unpacked_json(view[16 : 16 + length])
    if header["format"] != DELTA_FORMAT:
        message = f"its format is {header['format']!r}, this code reads {DELTA_FORMAT!r}"
        raise ValueError(message)
    delta = WeightDelta(
        base_weights_hash=str(header["base_weights_hash"]),
        weights_hash=str(header["weights_hash"]),
        block_bytes=int(header["block_bytes"]),
        files=tuple(
            DeltaFile(str(f["name"]), int(f["size"]), str(f["header_sha256"]), tuple(map(int, f["blocks"])))
            for f in header["files"]
        ),
        digests={str(tensor): str(digest) for tensor, digest in header["digests"].items()},
        proofs={str(tensor): str(proof) for tensor, proof in header["proofs"].items()},
        body=view[16 + length :],
        wait_for=lambda end: wait_for(16 + length + end),
    )
    lengths = [length for file in delta.files for length in file.blocks]
    if min(lengths, default=0) < 0 or sum(lengths) != len(delta.body) or not delta.files:
        message = f"its blocks do not fill its {len(delta.body)} bytes"
        raise ValueError(message)
    if delta.block_bytes % 8 or not 0 < delta.block_bytes <= _MAX_BLOCK_BYTES:
        message = f"its blocks cover {delta.block_bytes} bytes each"
        raise ValueError(message)
    if combined_hash(delta.digests) != delta.weights_hash:
        message = "the hashes of its tensors do not give its hash"
        raise ValueError(message)
    if delta.proofs.keys() != delta.digests.keys():
        message = "it does not prove each of its tensors"
        raise ValueError(message)
    return delta


def apply_deltas(base: Mapping[str, Path], deltas: Sequence[WeightDelta], out: Path) -> None:
    """Write the files that a chain of deltas makes from a base, proving every tensor.

    Args:
        base: Safetensors files of the base, by name.
        deltas: Oldest first; each one's base is the result of the one before.
        out: Existing folder; on failure nothing of this call stays in it.

    Raises:
        DeltaMismatchError: The chain is broken, belongs to other files, or does not give the promised tensors.
        CorruptObjectError: A block or a file of the base is damaged.
    """
    _check_chain(deltas)
    files = deltas[-1].files
    missing = ", ".join(file.name for file in files if file.name not in base)
    if missing:
        message = f"the base has no {missing}, which the delta changes; take the full weights instead"
        raise DeltaMismatchError(message, key=missing)
    written = [out / file.name for file in files]
    try:
        for file in files:
            _apply_to_file(base[file.name], file, deltas, out / file.name)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _check_chain(deltas: Sequence[WeightDelta]) -> None:
    for before, after in pairwise(deltas):
        if after.base_weights_hash != before.weights_hash:
            message = (
                f"a chain of deltas is broken: one gives weights {before.weights_hash[:12]}, the next one starts from "
                f"{after.base_weights_hash[:12]}; take the full weights instead"
            )
            raise DeltaMismatchError(message)
    shapes = {(d.block_bytes, tuple((f.name, f.size, f.header_sha256) for f in d.files)) for d in deltas}
    if len(shapes) != 1:
        message = f"{len(deltas)} deltas are applied together but are of {len(shapes)} different sets of files"
        raise DeltaMismatchError(message)


def _apply_to_file(source: Path, file: DeltaFile, deltas: Sequence[WeightDelta], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb", buffering=0) as opened, target.open("wb", buffering=0) as written:
        head = _head(opened, file.name)
        if hashlib.sha256(head.raw).hexdigest() != file.header_sha256 or head.size != file.size:
            message = f"{source} has other tensors than the base of the delta; take the full weights instead"
            raise DeltaMismatchError(message, key=file.name)
        written.write(head.raw)
        proof, buffers = TensorProofs(head.entries, file.name, deltas[-1].proofs), _Buffers(deltas[0].block_bytes)
        segments = list(_segments(head.entries, deltas[0].block_bytes))
        if any(len(f.blocks) != len(segments) for d in deltas for f in d.files if f.name == file.name):
            message = f"{file.name}: the deltas have other blocks than the file; take the full weights instead"
            raise DeltaMismatchError(message, key=file.name)
        with InBackground(proof.update) as proving:
            for segment, blocks in zip(segments, zip(*(d.blocks(file.name) for d in deltas), strict=True), strict=True):
                values = _read(opened, segment, buffers.next())
                for block in blocks:
                    apply_block(values, block)
                data = values.data.cast("B")
                proving.give(data)
                written.write(data)
        proof.finish()


@dataclass(frozen=True, slots=True)
class _Head:
    raw: bytes
    size: int
    entries: list[TensorEntry]


def _head(file: BinaryIO | io.RawIOBase, name: str) -> _Head:
    size = file.seek(0, io.SEEK_END)
    buffered: Any = file
    entries = read_header(buffered, size, name)
    start = min((entry.start for entry in entries), default=size)
    file.seek(0)
    return _Head(_exactly(buffered, start), size, entries)


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    length: int
    width: int


def _segments(entries: Sequence[TensorEntry], block_bytes: int) -> Iterator[_Segment]:
    """Yield the blocks of a file's data: neighbouring tensors of one width together, cut at the block size."""
    place = 0
    while place < len(entries):
        width, start, end = _width(entries[place]), entries[place].start, entries[place].start
        while place < len(entries) and _width(entries[place]) == width:
            end = entries[place].start + entries[place].length
            place += 1
        for begin in range(start, end, block_bytes):
            yield _Segment(begin, min(block_bytes, end - begin), width)


def _width(entry: TensorEntry) -> int:
    bits = element_bits(entry.dtype)
    return bits // 8 if bits is not None and bits % 8 == 0 and bits // 8 in WIDTHS else 1


class _Buffers:
    """Memory for blocks, used in turn: fresh memory for every block costs more than reading it."""

    def __init__(self, block_bytes: int) -> None:
        self._buffers = cycle([np.empty(block_bytes, np.uint8) for _ in range(BLOCKS_IN_FLIGHT + 2)])

    def next(self) -> NDArray[np.uint8]:
        """Return the buffer that was given away longest ago."""
        return next(self._buffers)


def _read(file: Any, segment: _Segment, buffer: NDArray[np.uint8]) -> Unsigned:  # noqa: ANN401 - raw files, memory
    """Read a block into a buffer and return it as elements."""
    values = buffer[: segment.length].view(f"u{segment.width}")
    file.seek(segment.start)
    view, place = values.data.cast("B"), 0
    while place < len(view):
        count = file.readinto(view[place:])
        if not count:
            raise CorruptObjectError(f"a file of weights ends at byte {segment.start + place}; it is truncated")
        place += count
    return values


def _exactly(file: Any, length: int) -> bytes:  # noqa: ANN401 - raw and buffered files
    data = b""
    while len(data) < length:
        more = file.read(length - len(data))
        if not more:
            raise CorruptObjectError(f"a file of weights ends at byte {len(data)}; it is truncated")
        data += more
    return data


def _file_document(name: str, head: _Head, blocks: list[int]) -> dict[str, object]:
    sha256 = hashlib.sha256(head.raw).hexdigest()
    return {"name": name, "size": head.size, "header_sha256": sha256, "blocks": blocks}


def _packed_json(document: Mapping[str, object]) -> bytes:
    import pyarrow as pa

    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    packed = pa.Codec("zstd").compress(text, asbytes=True)
    return len(text).to_bytes(8, "little") + bytes(packed)


def _unpacked_json(data: memoryview) -> Any:  # noqa: ANN401 - JSON
    import pyarrow as pa

    size = int.from_bytes(data[:8], "little")
    if size > _MAX_HEADER_BYTES:
        message = f"its header wants {size} bytes"
        raise ValueError(message)
    text = pa.Codec("zstd").decompress(pa.py_buffer(data[8:]), decompressed_size=size)
    return json.loads(bytes(text))


def _opened(source: bytes | Path) -> Any:  # noqa: ANN401 - raw files and memory
    return source.open("rb", buffering=0) if isinstance(source, Path) else io.BytesIO(source)


def _size(source: bytes | Path) -> int:
    return source.stat().st_size if isinstance(source, Path) else len(source)
