"""Hugging Face tensors between files and the shards of a layout.

Each rank reads the slices that it holds and nothing else. To write, the first shard of a stage collects one tensor
after the other, so a rank holds no more than the tensors of its own stage, on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor
from torch import distributed as dist

from stages.engines.megatron.layout import MegatronLayout, slice_bounds
from stages.engines.megatron.model_config import ModelConfig
from stages.engines.megatron.weight_map import MappedParameter, put_together, stage_parameters, take_apart
from stages.engines.training.resume_point import tensor_file_name


class TensorFiles:
    """Several safetensors files as one set of tensors, of which slices can be read; a context manager."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._owners: dict[str, Any] = {}
        for path in paths:
            opened = self._stack.enter_context(safe_open(path, framework="pt"))
            self._owners.update(dict.fromkeys(opened.keys(), opened))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def whole(self, name: str) -> Tensor:
        """Return a tensor."""
        tensor: Tensor = self._owners[name].get_tensor(name)
        return tensor

    def shard(self, name: str, dim: int | None, shard: int, num_shards: int) -> Tensor:
        """Return a shard's part of a tensor; filled up with zero rows where the dimension isn't divisible."""
        if dim is None:
            return self.whole(name)
        view = self._owners[name].get_slice(name)
        size = view.get_shape()[dim]
        start, end = slice_bounds(size, shard, num_shards)
        part: Tensor = view[start:end] if dim == 0 else view[:, start:end]
        width = -(-size // num_shards)
        if part.shape[dim] == width:
            return part
        padded = part.new_zeros([width if place == dim else extent for place, extent in enumerate(part.shape)])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        return padded


def local_tensor(
    files: TensorFiles, mapped: MappedParameter, config: ModelConfig, shard: int, num_shards: int, prefix: str = ""
) -> Tensor:
    """Return a shard of a parameter (or, with a prefix such as `exp_avg/`, of a moment) from files."""
    parts = [files.shard(f"{prefix}{name}", mapped.dim, shard, num_shards) for name in mapped.sources]
    return put_together(mapped, parts, config.head_dim)


def collected(
    mapped: MappedParameter, local: Tensor, config: ModelConfig, group: Any, num_shards: int  # noqa: ANN401 - a group
) -> list[tuple[str, Tensor]]:  # fmt: skip
    """Collect whole tensors on the first shard; all shards of a stage call it together.

    Args:
        mapped: The parameter.
        local: This shard's values of it.
        config: The model.
        group: The shards' process group.
        num_shards: Its size.

    Returns:
        Hugging Face names and tensors on the CPU; nothing on other shards than the first.
    """
    found = []
    for name, part in zip(mapped.sources, take_apart(mapped, local, config), strict=True):
        whole = _gathered(part.contiguous(), mapped.dim, config.shapes[name], group, num_shards)
        if whole is not None:
            found.append((name, whole))
    return found


def _gathered(
    part: Tensor, dim: int | None, shape: tuple[int, ...], group: Any, num_shards: int  # noqa: ANN401 - a group
) -> Tensor | None:  # fmt: skip
    if num_shards == 1:
        return part.cpu() if dim is None else part.cpu().narrow(dim, 0, shape[dim]).contiguous()
    is_first = dist.get_rank(group) == 0
    if dim is None:
        return part.cpu() if is_first else None
    parts = [torch.empty_like(part) for _ in range(num_shards)] if is_first else None
    dist.gather(part, parts, dst=dist.get_global_rank(group, 0), group=group)
    if parts is None:
        return None
    return torch.cat([each.cpu() for each in parts], dim=dim).narrow(dim, 0, shape[dim]).contiguous()


def index_document(config: ModelConfig, layout: MegatronLayout, stem: str, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the index of a model directory whose stages write a file each."""
    files = {
        source: tensor_file_name(stem, stage, layout.pp)
        for stage in range(layout.pp)
        for mapped in stage_parameters(config, layout, stage)
        if not mapped.is_copy
        for source in mapped.sources
    }
    num_elements = sum(torch.Size(config.shapes[name]).numel() for name in files)
    return {"metadata": {"total_size": num_elements * dtype.itemsize}, "weight_map": files}


def write_index(config: ModelConfig, layout: MegatronLayout, directory: Path, dtype: torch.dtype) -> None:
    """Write the index of a model directory of several files."""
    document = index_document(config, layout, "model", dtype)
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
