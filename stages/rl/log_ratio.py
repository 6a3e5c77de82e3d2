"""Log importance ratios between two policies, bounded so that their exponential is finite in fp32.

Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stages.rl.masks import masked_mean, zero_outside

LOG_RATIO_BOUND: Final = 20.0
"""Largest magnitude of a log-ratio before exp; e^20 = 4.9e8 is finite in fp32 with room for products."""


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    """Log-ratio within +-LOG_RATIO_BOUND; beyond it the gradient is 0 (as if the ratio were clipped there)."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def bound_log_ratio_straight_through(log_ratio: Tensor) -> Tensor:
    """Log-ratio within +-LOG_RATIO_BOUND whose gradient passes unchanged, so that a penalty keeps pulling beyond it."""
    return log_ratio + (log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) - log_ratio).detach()


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_old) of each token, fp32, bounded, 0 outside the mask.

    Args:
        logprobs: [B, T], of the policy being trained.
        old_logprobs: [B, T], of the policy that the ratio is taken to; no gradient flows into it.
        mask: [B, T], bool.

    Returns:
        [B, T].
    """
    log_ratio = zero_outside(logprobs, mask) - zero_outside(old_logprobs.detach(), mask)
    return bound_log_ratio(log_ratio)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Length-normalised log-ratio of each response, repeated over its tokens; 0 outside the mask.

    The plain sum grows with the length and its exponential explodes (trl#4772); GSPO takes the mean over the tokens.

    Args:
        logprobs: [B, T], of the policy being trained.
        old_logprobs: [B, T]; no gradient flows into it.
        mask: [B, T], bool.

    Returns:
        [B, T], constant over the unmasked tokens of a row.

    References:
        Zheng et al. 2025, Group Sequence Policy Optimization, equation 7.
    """
    log_ratio = zero_outside(logprobs, mask) - zero_outside(old_logprobs.detach(), mask)
    mean = bound_log_ratio(masked_mean(log_ratio, mask, dim=-1)).unsqueeze(-1)
    return torch.where(mask, mean, torch.zeros_like(log_ratio))
