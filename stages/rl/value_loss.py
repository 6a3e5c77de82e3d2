"""Clipped value loss of the critic.

Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from stages.rl.aggregation import Normaliser, token_mean
from stages.rl.masks import masked_sum, zero_outside


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSums:
    """Sums over unmasked tokens that describe a critic's step; parts add up."""

    num_tokens: float = 0.0
    """Tokens."""
    num_clipped: float = 0.0
    """Tokens whose clipped error is the larger one: no gradient."""
    sum_error: float = 0.0
    """Sum of return - value."""
    sum_squared_error: float = 0.0
    """Sum of (return - value)^2."""
    sum_return: float = 0.0
    """Sum of the returns."""
    sum_squared_return: float = 0.0
    """Sum of their squares."""

    def __add__(self, other: ValueSums) -> ValueSums:
        """Sums of both parts."""
        mine, theirs = self.to_mapping(), other.to_mapping()
        return ValueSums(**{name: mine[name] + theirs[name] for name in mine})

    def to_mapping(self) -> dict[str, float]:
        """The sums by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def metrics(self) -> dict[str, float]:
        """Share of clipped tokens, explained variance of the returns by the values of this step, and their means."""
        count = max(self.num_tokens, 1.0)
        mean_error, mean_return = self.sum_error / count, self.sum_return / count
        variance = self.sum_squared_return / count - mean_return**2
        unexplained = self.sum_squared_error / count - mean_error**2
        return {
            "value_clip_fraction": self.num_clipped / count,
            "explained_variance": 1.0 - unexplained / variance if variance > 0.0 else 0.0,
            "return_mean": mean_return,
            "value_mean": mean_return - mean_error,
        }


def value_sums(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueSums:
    """Describe a micro-batch; arguments as for `value_loss`."""
    values, old_values, returns = (zero_outside(x, mask).double() for x in (values, old_values, returns))
    errors = returns - values
    clipped = torch.zeros_like(mask)
    if clip is not None:
        bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
        clipped = (bounded != values) & ((bounded - returns).square() > errors.square())

    def total(part: Tensor) -> float:
        return float(masked_sum(part, mask).item())

    return ValueSums(
        num_tokens=float(mask.sum().item()),
        num_clipped=float((clipped & mask).sum().item()),
        sum_error=total(errors),
        sum_squared_error=total(errors.square()),
        sum_return=total(returns),
        sum_squared_return=total(returns.square()),
    )


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
