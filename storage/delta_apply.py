"""Applying a chain of deltas (``storage.weight_delta``) to a base's files: on several threads, every byte proved.

One block of the base, all changes to it and its place in the result belong together, so blocks are worked on at once
and in any order; the proofs of the tensors take them in order, right after they were made.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from storage.errors import DeltaMismatchError
from storage.in_order import InOrder
from storage.sparse_codec import apply_block
from storage.tensor_proof import TensorProofs
from storage.weight_blocks import WeightBlock, WeightsFile, weight_blocks
from storage.weight_delta import DeltaFile, WeightDelta


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
    with WeightsFile(source, file.name) as base, target.open("wb", buffering=0) as written:
        if hashlib.sha256(base.head).hexdigest() != file.header_sha256 or base.size != file.size:
            message = f"{source} has other tensors than the base of the delta; take the full weights instead"
            raise DeltaMismatchError(message, key=file.name)
        blocks = list(weight_blocks(base.entries, deltas[0].block_bytes))
        places = [delta.places(file.name) for delta in deltas]
        if any(len(of_delta) != len(blocks) for of_delta in places):
            message = f"{file.name}: the deltas have other blocks than the file; take the full weights instead"
            raise DeltaMismatchError(message, key=file.name)
        _reserve(written.fileno(), base.size)
        _write_at(written.fileno(), memoryview(base.head), 0)

        def apply(job: tuple[WeightBlock, tuple[slice, ...]], slot: int) -> memoryview:
            block, changes = job
            values = base.read(block, buffers[slot])
            for delta, place in zip(deltas, changes, strict=True):
                apply_block(values, delta.block(place))
            data = values.data.cast("B")
            _write_at(written.fileno(), data, block.start)
            return data

        proof = TensorProofs(base.entries, file.name, deltas[-1].proofs)
        with InOrder(apply) as applying:
            buffers = [np.empty(deltas[0].block_bytes, np.uint8) for _ in range(applying.num_slots)]
            for data in applying.results(zip(blocks, zip(*places, strict=True), strict=True)):
                proof.update(data)
        proof.finish()


def _reserve(fd: int, size: int) -> None:
    """Give a file its room at once: a full disk is found before the work, and writing costs a fraction."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems that cannot
            raise


def _write_at(fd: int, data: memoryview, start: int) -> None:
    place = 0
    while place < len(data):
        place += os.pwrite(fd, data[place:], start + place)
