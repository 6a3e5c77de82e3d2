"""Entropy of next-token distributions."""

from __future__ import annotations

from torch import Tensor


def entropy_of_log_softmax(log_softmax: Tensor) -> Tensor:
    """Entropy in nats, -sum p log p, over the last dimension.

    Args:
        log_softmax: [..., V], finite (a vocabulary of finite logits).

    Returns:
        [...].
    """
    return -(log_softmax.exp() * log_softmax).sum(dim=-1)
