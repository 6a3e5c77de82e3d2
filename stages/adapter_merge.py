"""A base and an adapter as one whole model directory, W + alpha / r * B A, for tools that know no adapters.

In numpy, so that no engine's environment is needed. Sums are made in fp32 and rounded once to the base's type: in bf16
an update below half a unit in the last place of a weight is lost, so the number of elements that changed is returned.
Engines of a run don't merge (`stages.engines.lora` says why).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from stages.engines.adapter_files import PREFIX, WEIGHTS_NAME, read_adapter_config
from stages.engines.weight_files import weight_files
from stages.errors import ContractError
from storage.weights_hash import TensorEntry, read_header

_FLOAT_TYPES: Final = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class MergeFacts:
    """What a merge did."""

    num_tensors: int
    """Weights that an adapter stands on."""
    num_elements: int
    """Their elements."""
    num_changed: int
    """Elements that differ from the base's after rounding to its type."""


def merge_adapter(base_dir: Path, adapter_dir: Path, out_dir: Path) -> MergeFacts:
    """Write the whole model into a fresh directory, with configuration and tokenizer of the base.

    Args:
        base_dir: Whole model in Hugging Face format.
        adapter_dir: PEFT LoRA adapter on it.
        out_dir: Must not exist.

    Raises:
        ContractError: The adapter belongs to another model, or a sum is no finite number.
        EngineError: One of the directories is not what it should be.
    """
    config = read_adapter_config(adapter_dir)
    scaling = float(config["lora_alpha"]) / int(config["r"])
    adapter = load_file(adapter_dir / WEIGHTS_NAME)
    out_dir.mkdir(parents=True)
    files = weight_files(base_dir)
    for path in sorted(base_dir.iterdir()):
        if path.is_file() and path not in files:
            shutil.copyfile(path, out_dir / path.name)
    merge = _Merge({name.removeprefix(PREFIX): value for name, value in adapter.items()}, scaling)
    for path in files:
        merge.write_file(path, out_dir / path.name)
    return merge.finish(adapter_dir)


class _Merge:
    def __init__(self, adapter: Mapping[str, NDArray[np.float32]], scaling: float) -> None:
        self._adapter, self._scaling = adapter, scaling
        self._unused = set(adapter)
        self._tensors = self._elements = self._changed = 0

    def write_file(self, source: Path, target: Path) -> None:
        """Copy a file of the base, tensor by tensor, with the adapter's share added; header and layout stay."""
        with source.open("rb") as read, target.open("wb") as write:
            entries = read_header(read, source.stat().st_size, source.name)
            read.seek(0)
            write.write(read.read(min((entry.start for entry in entries), default=source.stat().st_size)))
            for entry in entries:
                read.seek(entry.start)
                write.write(self._merged(entry, read.read(entry.length)))

    def finish(self, adapter_dir: Path) -> MergeFacts:
        """Return the facts, once every tensor of the adapter has been used."""
        if self._unused:
            raise ContractError(
                f"{adapter_dir} has tensors for layers that the base has not, e.g. {min(self._unused)}: it is an "
                "adapter of another model"
            )
        return MergeFacts(self._tensors, self._elements, self._changed)

    def _merged(self, entry: TensorEntry, data: bytes) -> bytes:
        layer = entry.name.removesuffix(".weight")
        down, up = self._adapter.get(f"{layer}.lora_A.weight"), self._adapter.get(f"{layer}.lora_B.weight")
        if down is None or up is None:
            return data
        if entry.dtype not in _FLOAT_TYPES or entry.shape != (up.shape[0], down.shape[1]):
            raise ContractError(
                f"{entry.name} is {entry.dtype} {list(entry.shape)}, its adapter is for {up.shape[0]} x "
                f"{down.shape[1]} of {', '.join(_FLOAT_TYPES)}: it is an adapter of another model"
            )
        total = _to_fp32(data, entry.dtype) + (np.float32(self._scaling) * (up @ down)).reshape(-1)
        if not np.isfinite(total).all():
            raise ContractError(f"{entry.name} with its adapter has elements that are no finite numbers")
        merged = _from_fp32(total, entry.dtype)
        self._unused -= {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"}
        self._tensors += 1
        self._elements += total.size
        self._changed += int((np.frombuffer(data, merged.dtype) != merged).sum())
        return merged.tobytes()


def _to_fp32(data: bytes, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def _from_fp32(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Return finite numbers rounded to nearest, ties to even; bf16 as its bits."""
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4")
        return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return values.astype("<f4" if dtype == "F32" else "<f2")
