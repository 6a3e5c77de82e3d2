"""Advantages of every token of an iteration, and the critic's targets: rewards, KL and values to what is trained on.

PPO and REINFORCE++ share it: REINFORCE++ is the case of a critic that says 0 and lambda 1. It is a function of
committed data alone (the KL is taken between the sampler's and the reference's log-probs), so the trainers of policy
and critic work it out for themselves and get the same numbers, bit for bit.

Legend of shapes: N rows (responses), T response positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stages.rl.gae import Bools, Floats, explained_variance, gae, token_rewards, whiten

_BOUND: Final = 20.0
"""As `stages.rl.log_ratio.LOG_RATIO_BOUND`: log-ratios are bounded before an exponential."""


def _k3(x: Floats) -> Floats:
    bounded = np.clip(x, -_BOUND, _BOUND)
    return np.maximum(np.expm1(-bounded) + bounded, 0.0)


KL_ESTIMATORS: Final[Mapping[str, Callable[[Floats], Floats]]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * np.square(x),
    "k3": _k3,
}
"""Value of each estimator of `stages.rl.kl` that a reward may have, from x = log policy - log reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The responses of an iteration as the estimators need them."""

    rewards: Floats
    """[N]; never read where `kept` is false."""
    kept: Bools
    """[N], rows that are trained on."""
    policy_logprobs: Sequence[Sequence[float]]
    """[N][tokens], of the policy that sampled."""
    reference_logprobs: Sequence[Sequence[float]] | None = None
    """[N][tokens], or None without a KL penalty."""
    values: Sequence[Sequence[float]] | None = None
    """[N][tokens], the critic's value before each token; None = 0 everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTargets:
    """What the trainers of policy and critic learn from."""

    advantages: Floats
    """[N, T], whitened if that was asked for; 0 outside the mask."""
    returns: Floats
    """[N, T], advantage before whitening + value."""
    values: Floats
    """[N, T]."""
    mask: Bools
    """[N, T], tokens of kept rows."""
    kl_per_response: float | None
    """Mean over kept rows of the summed KL estimate, nats; None without reference."""
    explained_variance: float
    """Of the returns by the values, before the update."""

    def advantages_of(self, row: int) -> list[float]:
        """Advantages of a row's tokens, [tokens]."""
        return [float(value) for value in self.advantages[row, self.mask[row]]]

    def returns_of(self, row: int) -> list[float]:
        """Returns of a row's tokens, [tokens]."""
        return [float(value) for value in self.returns[row, self.mask[row]]]

    def values_of(self, row: int) -> list[float]:
        """Values of a row's tokens, [tokens]."""
        return [float(value) for value in self.values[row, self.mask[row]]]

    def row_means(self) -> Floats:
        """[N], mean advantage over a row's tokens; 0 for rows that are left out."""
        means: Floats = self.advantages.sum(axis=1) / np.maximum(self.mask.sum(axis=1), 1)
        return means


def token_targets(
    batch: TokenBatch,
    *,
    discount: float,
    gae_lambda: float,
    kl_estimator: str,
    kl_weight: float,
    is_whitened: bool,
) -> TokenTargets:
    """GAE over rewards that hold the KL penalty.

    Args:
        batch: All rows of an iteration: whitening is over all of them, never over a mini-batch.
        discount: In (0, 1].
        gae_lambda: In [0, 1].
        kl_estimator: A key of `KL_ESTIMATORS`.
        kl_weight: Factor of the KL in the reward; 0 = the KL is only measured.
        is_whitened: Whether advantages get mean 0 and standard deviation 1 over the tokens.

    Raises:
        ValueError: A row's columns differ in length.

    References:
        Ouyang et al. 2022, InstructGPT, equation 2 (KL per token in the reward); Schulman et al. 2016, equation 16.
    """
    lengths = np.array([len(row) for row in batch.policy_logprobs], dtype=np.int64)
    width = int(lengths.max(initial=1))
    mask = (np.arange(width) < lengths[:, None]) & np.asarray(batch.kept, dtype=np.bool_)[:, None]
    policy = _padded(batch.policy_logprobs, lengths, width, "policy_logprobs")
    values = np.zeros_like(policy) if batch.values is None else _padded(batch.values, lengths, width, "values")
    kl, kl_per_response = None, None
    if batch.reference_logprobs is not None:
        reference = _padded(batch.reference_logprobs, lengths, width, "reference_logprobs")
        kl = np.where(mask, KL_ESTIMATORS[kl_estimator](policy - reference), 0.0)
        kl_per_response = float(kl.sum() / max(int(np.count_nonzero(mask.any(axis=1))), 1))
    rewards = token_rewards(np.where(batch.kept, batch.rewards, 0.0), mask, kl, kl_weight)
    estimated = gae(rewards, values, mask, discount=discount, gae_lambda=gae_lambda)
    return TokenTargets(
        advantages=whiten(estimated.advantages, mask) if is_whitened else estimated.advantages,
        returns=estimated.returns,
        values=np.where(mask, values, 0.0),
        mask=mask,
        kl_per_response=kl_per_response,
        explained_variance=explained_variance(values, estimated.returns, mask),
    )


def _padded(rows: Sequence[Sequence[float]], lengths: np.ndarray[tuple[int], np.dtype[np.int64]], width: int,
            name: str) -> Floats:  # fmt: skip
    padded = np.zeros((len(rows), width), dtype=np.float64)
    for place, row in enumerate(rows):
        if len(row) != lengths[place]:
            raise ValueError(f"row {place} has {len(row)} {name} for {lengths[place]} sampled tokens")
        padded[place, : len(row)] = row
    return padded
