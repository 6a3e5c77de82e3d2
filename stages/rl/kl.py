"""Per-token estimators of KL(policy || reference) from log-probs of the sampled tokens.

With x = log policy - log reference, for tokens sampled from the policy (Schulman 2020, "Approximating KL divergence"):

- k1 = x: unbiased, may be negative.
- k2 = x^2 / 2: biased, >= 0; its gradient is the unbiased gradient of the KL on policy.
- k3 = exp(-x) - 1 + x: unbiased, >= 0; its gradient is biased.
- k3_straight_through: the value of k3 with the gradient of k2.

Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from stages.rl.log_ratio import bound_log_ratio_straight_through
from stages.rl.masks import zero_outside


def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio x itself; linear, so it needs no bound."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square of x; finite in fp32 for every |x| < 1e19."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x with x bounded before the exponential.

    `expm1` keeps small x exact, where exp(-x) - 1 would cancel. Beyond the bound the gradient is that at the bound, so
    that a token which the policy has all but lost is still pulled back. `clamp_min` removes a last-bit negative only.
    """
    x = bound_log_ratio_straight_through(log_ratio)
    return (torch.expm1(-x) + x).clamp_min(0.0)


def k3_straight_through(log_ratio: Tensor) -> Tensor:
    """Value of k3, gradient of k2."""
    gradient_of = k2(log_ratio)
    return gradient_of + (k3(log_ratio) - gradient_of).detach()


ESTIMATORS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_straight_through": k3_straight_through,
}
"""Estimator by its name in `KlSpec.estimator`; each maps log-ratios to penalties, elementwise."""


def kl_per_token(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) at each token, fp32, 0 outside the mask.

    Args:
        logprobs: [B, T], of the policy being trained.
        reference_logprobs: [B, T]; no gradient flows into it.
        mask: [B, T], bool.
        estimator: A key of `ESTIMATORS`.

    Returns:
        [B, T].
    """
    log_ratio = zero_outside(logprobs, mask) - zero_outside(reference_logprobs.detach(), mask)
    return ESTIMATORS[estimator](log_ratio)
