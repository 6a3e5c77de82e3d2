"""Masked reductions that neither read nor differentiate what lies outside the mask, and give 0 where nothing is left.

`values * mask` would turn a NaN outside the mask into a NaN sum; `torch.where` selects, so it doesn't (verl#782).
Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is true; 0 where the mask is empty.

    Args:
        values: Any shape.
        mask: Same shape, bool.
        dim: Dimension to reduce; None = all.
    """
    kept = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is true; 0, not NaN, where the mask is empty.

    Args:
        values: Any shape.
        mask: Same shape, bool.
        dim: Dimension to reduce; None = all.
    """
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in fp32 with 0 outside the mask; the gradient there is 0 whatever stood there.

    Inputs of exponentials go through here first: selecting after the exponential leaves 0 * inf = NaN in the
    backward pass (OpenRLHF#1335).

    Args:
        values: [B, T].
        mask: [B, T], bool.
    """
    return torch.where(mask, values.float(), torch.zeros((), dtype=torch.float32, device=values.device))
