"""Generalised advantage estimation per token (PPO), and the rewards per token that it starts from.

Numpy in, numpy out. Tokens outside the mask (padding, tool output between two turns) are stepped over: the chain goes
from an unmasked token to the next unmasked one.

Legend of shapes: B rows (responses), T response positions.

References:
    Schulman et al. 2016, High-dimensional continuous control using generalized advantage estimation, equation 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Advantages and the critic's targets."""

    advantages: Floats
    """[B, T]; 0 outside the mask."""

    returns: Floats
    """[B, T], advantage + value: target of the critic; 0 outside the mask."""


def token_rewards(sequence_rewards: Floats, mask: Bools, kl: Floats | None = None, kl_weight: float = 0.0) -> Floats:
    """Rewards per token: -kl_weight * kl at every token, the response's reward added at its last unmasked one.

    Args:
        sequence_rewards: [B].
        mask: [B, T]; a row without unmasked tokens gets no reward.
        kl: [B, T], per-token estimate of KL(policy || reference), or None.
        kl_weight: >= 0.

    Returns:
        [B, T]; 0 outside the mask.
    """
    mask = np.asarray(mask, dtype=np.bool_)
    rewards = np.zeros(mask.shape, dtype=np.float64)
    if kl is not None:
        rewards -= kl_weight * np.where(mask, kl, 0.0)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    rewards[rows, last[rows]] += np.asarray(sequence_rewards, dtype=np.float64)[rows]
    return rewards


def gae(
    rewards: Floats,
    values: Floats,
    mask: Bools,
    *,
    discount: float,
    gae_lambda: float,
    bootstrap_values: Floats | None = None,
) -> TokenAdvantages:
    """A_t = delta_t + discount * lambda * A_t+1 with delta_t = r_t + discount * V_t+1 - V_t.

    Args:
        rewards: [B, T]; what stands outside the mask is never read.
        values: [B, T], the critic's values V_t before token t is known; never read outside the mask.
        mask: [B, T].
        discount: In (0, 1].
        gae_lambda: In [0, 1]. 1 gives return - value, 0 the one-step temporal difference.
        bootstrap_values: [B], value after the last token of a response that was cut; None = 0, the response has ended.

    Returns:
        Advantages and returns. O(B T).
    """
    mask = np.asarray(mask, dtype=np.bool_)
    rewards = np.where(mask, rewards, 0.0)
    values = np.where(mask, values, 0.0)
    next_value = np.zeros(mask.shape[0]) if bootstrap_values is None else np.array(bootstrap_values, dtype=np.float64)
    next_advantage = np.zeros(mask.shape[0])
    advantages = np.zeros(mask.shape)
    for t in reversed(range(mask.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + discount * gae_lambda * next_advantage
        next_advantage = np.where(here, advantage, next_advantage)
        next_value = np.where(here, values[:, t], next_value)
        advantages[:, t] = np.where(here, advantage, 0.0)
    return TokenAdvantages(advantages=advantages, returns=np.where(mask, advantages + values, 0.0))


def whiten(advantages: Floats, mask: Bools) -> Floats:
    """Advantages with mean 0 and (population) standard deviation 1 over the unmasked tokens of the iteration.

    Constant advantages become 0. Call it once with all rows of an iteration: done per micro-batch it would make the
    loss depend on the split.

    Args:
        advantages: [B, T].
        mask: [B, T].

    Returns:
        [B, T]; 0 outside the mask.
    """
    mask = np.asarray(mask, dtype=np.bool_)
    kept = advantages[mask]
    if kept.size == 0:
        return np.zeros(mask.shape)
    return np.where(mask, (advantages - kept.mean()) / (kept.std() + 1e-8), 0.0)


def explained_variance(values: Floats, returns: Floats, mask: Bools) -> float:
    """Share of the variance of the returns that the critic's values explain: 1 - var(returns - values) / var(returns).

    1 is a perfect critic, 0 one no better than a constant, negative a worse one; 0 when the returns don't vary.

    Args:
        values: [B, T], of the critic before the update.
        returns: [B, T], its targets.
        mask: [B, T].
    """
    mask = np.asarray(mask, dtype=np.bool_)
    targets = np.asarray(returns, dtype=np.float64)[mask]
    variance = float(targets.var()) if targets.size else 0.0
    if variance == 0.0:
        return 0.0
    return 1.0 - float((targets - np.asarray(values, dtype=np.float64)[mask]).var()) / variance
