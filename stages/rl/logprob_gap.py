"""Gap between the log-probs that two engines give the same tokens: the canary after a start and after a weight sync.

Numpy only, so that the stage which compares needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.errors import NumericsError


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """Difference of two sets of log-probs over the unmasked tokens, nats."""

    mean_abs: float
    """Mean absolute difference."""

    max_abs: float
    """Largest absolute difference."""

    num_tokens: int
    """Tokens compared."""


def measure_logprob_gap(
    sampler_logprobs: NDArray[np.float64], trainer_logprobs: NDArray[np.float64], mask: NDArray[np.bool_]
) -> LogprobGap:
    """Gap over the unmasked tokens of [B, T] arrays; 0 when there are none. NaN on either side counts as infinite."""
    gap = np.abs(np.asarray(sampler_logprobs, np.float64) - np.asarray(trainer_logprobs, np.float64))[mask]
    if gap.size == 0:
        return LogprobGap(mean_abs=0.0, max_abs=0.0, num_tokens=0)
    gap = np.where(np.isnan(gap), np.inf, gap)
    return LogprobGap(mean_abs=float(gap.mean()), max_abs=float(gap.max()), num_tokens=int(gap.size))


def check_logprob_gap(gap: LogprobGap, *, max_mean_abs: float, where: str) -> None:
    """Refuse to go on when sampler and trainer don't compute the same distribution.

    Args:
        gap: Measured on fixed rows.
        max_mean_abs: Largest allowed mean absolute difference, nats.
        where: What was compared, for the message.

    Raises:
        NumericsError: The gap is over the limit, or nothing was compared.
    """
    if gap.num_tokens == 0:
        raise NumericsError(f"{where}: no tokens to compare sampler and trainer log-probs on; give the canary rows")
    if not gap.mean_abs <= max_mean_abs:
        raise NumericsError(
            f"{where}: sampler and trainer log-probs differ by {gap.mean_abs:.4g} nats in the mean over "
            f"{gap.num_tokens} tokens (largest {gap.max_abs:.4g}); allowed {max_mean_abs:.4g}. They hold different "
            "weights, or one of them skips a step (temperature, final logit soft-cap, another dtype)",
            mean_abs=gap.mean_abs,
            max_abs=gap.max_abs,
            num_tokens=gap.num_tokens,
        )
