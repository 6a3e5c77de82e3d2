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
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from storage.errors import CorruptObjectError
from storage.in_order import InOrder
from storage.sparse_codec import encode_block
from storage.tensor_proof import TensorProofs
from storage.weight_blocks import WeightBlock, WeightsFile, weight_blocks
from storage.weights_hash import combined_hash

DELTA_FORMAT: Final = "motley.weight_delta/2"
BLOCK_BYTES: Final = 4 << 20
"""Bytes of weights per block: small enough for a cache, large enough that zstd sees enough of the changes."""
MAX_FRACTION: Final = 0.5
"""Size of a delta, relative to its files, from which on it is not worth having."""

_MAGIC: Final = b"MTLDELTA"
_MAX_HEADER_BYTES: Final = 256 << 20
_MAX_BLOCK_BYTES: Final = 64 << 20
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

    def places(self, name: str) -> list[slice]:
        """Return where in the body the blocks of one file lie."""
        places, start = list[slice](), 0
        for file in self.files:
            for length in file.blocks:
                if file.name == name:
                    places.append(slice(start, start + length))
                start += length
        return places

    def block(self, place: slice) -> memoryview:
        """Return a block, once it is there."""
        self.wait_for(place.stop)
        return self.body[place]


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
        with WeightsFile(base[name], name) as old, WeightsFile(new[name], name) as changed:
            if old.head != changed.head or old.size != changed.size:
                return None
            proving = TensorProofs(changed.entries, name)
            found = _encoded_blocks(old, changed, block_bytes, proving, room)
            if found is None:
                return None
            files.append(_file_document(name, changed, found))
        room -= sum(map(len, found))
        blocks += found
        proofs |= proving.found
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
    old: WeightsFile, new: WeightsFile, block_bytes: int, proofs: TensorProofs, room: int
) -> list[bytes] | None:
    """Return the blocks of one file, its tensors proved on the way; ``None`` when they take more than ``room``."""

    def encode(block: WeightBlock, slot: int) -> tuple[bytes, memoryview]:
        values = new.read(block, buffers[slot][1])
        return encode_block(old.read(block, buffers[slot][0]), values), values.data.cast("B")

    blocks, size = list[bytes](), 0
    with InOrder(encode) as encoding:
        buffers = [np.empty((2, block_bytes), np.uint8) for _ in range(encoding.num_slots)]
        for block, values in encoding.results(weight_blocks(new.entries, block_bytes)):
            proofs.update(values)
            blocks.append(block)
            size += len(block)
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


def _file_document(name: str, file: WeightsFile, blocks: list[bytes]) -> dict[str, object]:
    sha256 = hashlib.sha256(file.head).hexdigest()
    return {"name": name, "size": file.size, "header_sha256": sha256, "blocks": [len(block) for block in blocks]}


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


def _size(source: bytes | Path) -> int:
    return source.stat().st_size if isinstance(source, Path) else len(source)
