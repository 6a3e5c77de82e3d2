"""Clipped policy-gradient surrogate of PPO, with separate clip widths and the optional dual clip.

Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Token losses and which of them a clip bound holds."""

    losses: Tensor
    """[B, T], to be minimised."""

    clipped_low: Tensor
    """[B, T], bool: the lower clip decides (negative advantage, ratio under 1 - clip_low): no gradient."""

    clipped_high: Tensor
    """[B, T], bool: the upper clip decides (positive advantage, ratio over 1 + clip_high): no gradient."""

    dual_clipped: Tensor
    """[B, T], bool: the dual clip decides (negative advantage, ratio over c): no gradient."""


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """Loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, with r = exp(log_ratio).

    With `dual_clip` = c the loss of a token with A < 0 is at most c |A|, which bounds the push away from a token whose
    ratio has grown.

    Args:
        log_ratio: [B, T], bounded (see `stages.rl.log_ratio`).
        advantages: [B, T], or [B, 1] for one per response.
        clip_low: Lower clip width, in [0, 1).
        clip_high: Upper clip width, >= 0.
        dual_clip: c > 1, or None.

    References:
        Schulman et al. 2017, Proximal policy optimization, equation 7; Ye et al. 2020, Mastering complex control in
        MOBA games, equation 5 (dual clip); Yu et al. 2025, DAPO, equation 10 (separate widths).
    """
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    # Equal losses mean that the ratio lies inside the range (or A = 0): no clip decides there.
    decided = clipped > unclipped
    dual_clipped = torch.zeros_like(decided)
    if dual_clip is not None:
        ceiling = (-advantages * dual_clip).expand_as(losses)
        dual_clipped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(dual_clipped, ceiling, losses)
    return Surrogate(
        losses=losses,
        clipped_low=decided & (advantages < 0),
        clipped_high=decided & (advantages > 0),
        dual_clipped=dual_clipped,
    )
