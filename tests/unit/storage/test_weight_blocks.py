"""Blocks of a safetensors file: they cover its data, keep widths apart, and read the same from disk and memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from storage.errors import CorruptObjectError
from storage.weight_blocks import WeightsFile, weight_blocks

DATA = save(
    {
        "a": np.arange(3000, dtype=np.uint16),
        "b": np.arange(70, dtype=np.float32),
        "c": np.arange(33, dtype=np.uint8),
        "d": np.arange(9, dtype=np.float64),
    }
)


@pytest.fixture(params=["disk", "memory"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> bytes | Path:
    if request.param == "memory":
        return DATA
    (tmp_path / "m").write_bytes(DATA)
    return tmp_path / "m"


@pytest.mark.parametrize("block_bytes", [8, 512, 1 << 20])
def test_head_and_blocks_are_the_file(source: bytes | Path, block_bytes: int) -> None:
    with WeightsFile(source, "m") as file:
        buffer = np.empty(block_bytes, np.uint8)
        blocks = list(weight_blocks(file.entries, block_bytes))
        data = b"".join(file.read(block, buffer).tobytes() for block in blocks)
        assert bytes(file.head) + data == DATA
        assert file.size == len(DATA)
        assert {block.width for block in blocks} == {1, 2, 4, 8}
        assert all(block.length % block.width == 0 for block in blocks)


def test_elements_have_the_width_of_their_tensor(source: bytes | Path) -> None:
    with WeightsFile(source, "m") as file:
        (block,) = [block for block in weight_blocks(file.entries, 1 << 20) if block.width == 2]
        values = file.read(block, np.empty(block.length, np.uint8))
        assert values.tolist() == list(range(3000))


def test_file_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(DATA)
    with WeightsFile(path, "m") as file:
        os.truncate(path, len(DATA) - 10)
        last = list(weight_blocks(file.entries, 1 << 20))[-1]
        with pytest.raises(CorruptObjectError, match="it is truncated"):
            file.read(last, np.empty(last.length, np.uint8))


@pytest.mark.parametrize("length", [0, 7, 20, len(DATA) - 1])
def test_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "m").write_bytes(DATA[:length])
    with pytest.raises(CorruptObjectError):
        WeightsFile(tmp_path / "m", "m")
