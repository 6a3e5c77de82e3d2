"""Weights, gradients and moments spread over data-parallel ranks (torch's FSDP2), and how files meet them.

A rank keeps an equal part of each tensor. A decoder layer is whole on a rank for its own forward and backward pass
only; embedding, last norm and head are whole from the start of a forward pass to its backward pass. So every forward
pass is a meeting of all ranks, and all must make the same number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from stages.engines.training.rank_group import RankGroup


def shard_weights(module: nn.Module, model: Any, ranks: RankGroup) -> None:  # noqa: ANN401 - transformers has no type
    """Leave each rank a part of every tensor, on the ranks' device.

    Args:
        module: What the trainer calls; a backward pass leaves the mean of the ranks' gradients.
        model: The transformers model in it, whole on every rank.
        ranks: All ranks of torch's default process group.
    """
    mesh = DeviceMesh.from_group(dist.group.WORLD, ranks.device.type)
    layers = set(model._no_split_modules or ())
    for part in [part for part in model.modules() if type(part).__name__ in layers]:
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    root: Any = module
    # gloo knows no mean: sum, then divide.
    root.set_force_sum_reduction_for_comms(True)


def whole_value(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks; where it is spread, all ranks call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_cpu(
    tensors: Mapping[str, Tensor], ranks: RankGroup, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return whole tensors on the CPU of rank 0, one after the other, and nothing on other ranks; all call it together.

    Args:
        tensors: The same names in the same order on all ranks.
        ranks: All ranks.
        dtype: Type of the result; None = each tensor's own.
    """
    found = {}
    for name, tensor in tensors.items():
        if ranks.rank == 0 or isinstance(tensor, DTensor):
            value = whole_value(tensor.detach())
            if ranks.rank == 0:
                found[name] = value.to("cpu", dtype).contiguous()
    return found


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, laid out and placed as another one of its shape, which may be whole.

    Nothing is sent: every rank has the whole.
    """
    placed = value.to(like.device)
    if not isinstance(like, DTensor):
        return placed
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Replace a tensor, which may be spread, by a whole one."""
    with torch.no_grad():
        target.copy_(part_of(value.to(target.dtype), target))
