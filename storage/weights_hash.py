"""Hash of a model's tensors: names, types, shapes and bytes, independent of how they are split over files.

The safetensors container is read by its published layout (8 bytes header length, JSON header, data), because the
numpy bindings cannot hold bfloat16 and torch is not a dependency of storage.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from storage.errors import CorruptObjectError, InvalidInputError
from storage.ranged_reads import COPY_BYTES

_MAX_HEADER_BYTES = 100_000_000
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file."""

    name: str
    """Tensor name."""
    dtype: str
    """Element type as the container spells it, e.g. ``BF16``."""
    shape: tuple[int, ...]
    """Shape."""
    start: int
    """First byte, counted from the start of the file."""
    length: int
    """Length in bytes."""


def read_header(file: BinaryIO, size_bytes: int, name: str) -> list[TensorEntry]:
    """Return the tensors of a safetensors file, in the order of their bytes.

    Args:
        file: Opened file, at any position.
        size_bytes: Its length; the tensors must fill it exactly.
        name: File name, for messages.

    Raises:
        CorruptObjectError: Truncated, or the header contradicts itself or the file's length.
    """
    try:
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise _truncated(name, size_bytes, f"its header wants {length} bytes")
        header = json.loads(file.read(length))
        entries = [
            TensorEntry(
                tensor,
                str(field["dtype"]),
                tuple(int(extent) for extent in field["shape"]),
                8 + length + int(field["data_offsets"][0]),
                int(field["data_offsets"][1]) - int(field["data_offsets"][0]),
            )
            for tensor, field in header.items()
            if tensor != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        message = f"{name} is no safetensors file: its header cannot be read ({error!r})"
        raise CorruptObjectError(message, key=name) from error
    return _checked_entries(sorted(entries, key=lambda entry: (entry.start, entry.name)), 8 + length, size_bytes, name)


def weights_hash(files: Mapping[str, bytes | Path]) -> str:
    """Return the SHA-256 (hex) over all tensors of the ``*.safetensors`` files; see :func:`tensor_digests`."""
    return combined_hash(tensor_digests(files))


def combined_hash(digests: Mapping[str, str]) -> str:
    """Return the hash of a model from the digests of its tensors."""
    total = hashlib.sha256()
    for tensor in sorted(digests):
        total.update(f"{json.dumps(tensor)} {digests[tensor]}\n".encode())
    return total.hexdigest()


def adapter_hash(base_weights_hash: str, digests: Mapping[str, str]) -> str:
    """Return the hash of a model that is a base with an adapter, from the base's hash and the adapter's digests."""
    return hashlib.sha256(f"adapter {base_weights_hash} {combined_hash(digests)}\n".encode()).hexdigest()


def element_bits(dtype: str) -> int | None:
    """Return the bits of an element by the container's name of its type, ``None`` for a type not known here."""
    return _BITS.get(dtype)


def digest_head(entry: TensorEntry) -> bytes:
    """Return what is hashed of a tensor before its bytes: type and shape are part of its digest."""
    return f"{entry.dtype} {list(entry.shape)}\n".encode()


def tensor_digests(files: Mapping[str, bytes | Path]) -> dict[str, str]:
    """Return the SHA-256 (hex) of type, shape and bytes of each tensor of the ``*.safetensors`` files, by its name.

    Args:
        files: Content (bytes or local path) by file name; other names are ignored.

    Raises:
        CorruptObjectError: A file is truncated or malformed.
        InvalidInputError: There is no safetensors file, or a tensor occurs in two files.
    """
    digests: dict[str, str] = {}
    for name in sorted(files):
        if not name.endswith(".safetensors"):
            continue
        for tensor, digest in _digests_of_file(files[name], name).items():
            if tensor in digests:
                message = f"tensor {tensor} occurs in {name} and in another file of the same model"
                raise InvalidInputError(message)
            digests[tensor] = digest
    if not digests:
        message = (
            f"no tensors to hash: a policy needs *.safetensors files, found {', '.join(sorted(files)) or 'nothing'}"
        )
        raise InvalidInputError(message)
    return digests


def _digests_of_file(source: bytes | Path, name: str) -> dict[str, str]:
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        return {entry.name: _tensor_digest(file, entry) for entry in read_header(file, size, name)}


def _tensor_digest(file: BinaryIO, entry: TensorEntry) -> str:
    digest = hashlib.sha256(digest_head(entry))
    file.seek(entry.start)
    left = entry.length
    while left:
        block = file.read(min(left, COPY_BYTES))
        if not block:
            raise _truncated(entry.name, entry.start + entry.length - left, "its data ends early")
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def _checked_entries(entries: list[TensorEntry], start: int, size_bytes: int, name: str) -> list[TensorEntry]:
    place = start
    for entry in entries:
        bits = _BITS.get(entry.dtype)
        if entry.start != place or (bits is not None and entry.length != (prod(entry.shape) * bits + 7) // 8):
            found = f"lies at byte {entry.start} with {entry.length} bytes"
            message = f"{name}: tensor {entry.name} {found}, which contradicts its type, its shape or its neighbour"
            raise CorruptObjectError(message, key=name)
        place += entry.length
    if place != size_bytes:
        raise _truncated(name, size_bytes, f"its tensors end at byte {place}")
    return entries


def _truncated(name: str, size_bytes: int, why: str) -> CorruptObjectError:
    message = f"{name} is truncated or damaged: it has {size_bytes} bytes, but {why}; write it again"
    return CorruptObjectError(message, key=name)
