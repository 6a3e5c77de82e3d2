"""Clipped value loss of the critic.

Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.rl.aggregation import Normaliser, token_mean
from stages.rl.masks import zero_outside


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, normaliser: Normaliser, clip: float | None
) -> Tensor:
    """Half the squared error, the larger of the clipped and the unclipped one, averaged over the step's tokens.

    Args:
        values: [B, T], of the critic being trained; has the gradient.
        old_values: [B, T], of the critic before the iteration's first optimizer step.
        returns: [B, T], targets.
        mask: [B, T], bool.
        normaliser: Counts over the whole optimizer step.
        clip: Half width of the interval around `old_values`; None = no clipping.

    Returns:
        Scalar.

    References:
        Schulman et al. 2017 as implemented in openai/baselines ppo2 (value clipping).
    """
    values, old_values, returns = (zero_outside(x, mask) for x in (values, old_values, returns))
    errors = (values - returns).square()
    if clip is not None:
        bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
        errors = torch.maximum(errors, (bounded - returns).square())
    return token_mean(0.5 * errors, mask, normaliser)
