"""Soft overlong penalty of DAPO: long answers cost something before they are cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def soft_overlong_penalty(
    response_tokens: NDArray[np.int64], *, max_response_tokens: int, buffer_tokens: int, factor: float
) -> NDArray[np.float64]:
    """Penalty to add to the reward: 0 up to limit - buffer, then linear down to -factor at the limit.

    Args:
        response_tokens: [N], length of each response, tokens.
        max_response_tokens: Response limit of the job, tokens.
        buffer_tokens: Length of the penalised zone, tokens; 0 = no penalty anywhere.
        factor: Largest penalty, reward units, >= 0.

    Returns:
        [N], in [-factor, 0].

    Example:
        Limit 10, buffer 4, factor 1: lengths 6, 8, 10 cost 0, -0.5, -1.

    References:
        Yu et al. 2025, DAPO, equation 13.
    """
    lengths = np.asarray(response_tokens, dtype=np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths)
    excess = lengths - (max_response_tokens - buffer_tokens)
    return -factor * np.clip(excess / buffer_tokens, 0.0, 1.0)
