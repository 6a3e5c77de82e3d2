"""Laws of token advantages for random responses; numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rl.token_targets import TokenBatch, TokenTargets, token_targets

SEEDS = st.integers(0, 2**32 - 1)


def random_batch(seed: int) -> TokenBatch:
    """Up to six responses of up to five tokens; about half of the rows are left out."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, size=rng.integers(1, 7))

    def numbers() -> list[list[float]]:
        return [rng.uniform(-5, 5, size=length).tolist() for length in lengths]

    return TokenBatch(
        rewards=rng.uniform(-5, 5, size=lengths.size),
        kept=rng.random(lengths.size) < 0.6,
        policy_logprobs=numbers(),
        reference_logprobs=numbers(),
        values=numbers(),
    )


def targets(batch: TokenBatch, **changes: Any) -> TokenTargets:
    options: dict[str, Any] = {
        "discount": 0.9, "gae_lambda": 0.8, "kl_estimator": "k1", "kl_weight": 0.1, "is_whitened": False,
    }  # fmt: skip
    return token_targets(batch, **{**options, **changes})


def reordered(batch: TokenBatch, order: list[int]) -> TokenBatch:
    def taken(rows: Sequence[Any]) -> list[Any]:
        return [rows[i] for i in order]

    return TokenBatch(
        rewards=batch.rewards[order],
        kept=batch.kept[order],
        policy_logprobs=taken(batch.policy_logprobs),
        reference_logprobs=taken(batch.reference_logprobs),
        values=taken(batch.values),
    )


@settings(deadline=None)
@given(SEEDS)
def test_n11_order_of_rows_changes_no_row(seed: int) -> None:
    batch = random_batch(seed)
    order = np.random.default_rng(seed).permutation(len(batch.rewards)).tolist()
    straight, shuffled = targets(batch), targets(reordered(batch, order))
    for place, row in enumerate(order):
        assert shuffled.advantages_of(place) == straight.advantages_of(row)
        assert shuffled.returns_of(place) == straight.returns_of(row)


@settings(deadline=None)
@given(SEEDS)
def test_return_is_advantage_plus_value_and_nothing_stands_outside_the_mask(seed: int) -> None:
    batch = random_batch(seed)
    found = targets(batch)
    np.testing.assert_allclose(found.returns, found.advantages + found.values, atol=1e-12)
    assert not found.advantages[~found.mask].any()
    assert not found.returns[~found.mask].any()


@settings(deadline=None)
@given(SEEDS)
def test_a_perfect_critic_leaves_no_advantage(seed: int) -> None:
    """With lambda 1 the returns don't depend on the values; a critic that says them has nothing to add."""
    batch = random_batch(seed)
    returns = targets(batch, gae_lambda=1.0, discount=1.0).returns
    perfect = [list(returns[row, : len(line)]) for row, line in enumerate(batch.policy_logprobs)]
    again = targets(
        TokenBatch(
            rewards=batch.rewards, kept=batch.kept, policy_logprobs=batch.policy_logprobs,
            reference_logprobs=batch.reference_logprobs, values=perfect,
        ),
        gae_lambda=1.0, discount=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(again.advantages, 0.0, atol=1e-9)


@settings(deadline=None)
@given(SEEDS, st.integers(-5, 5))
def test_reinforce_pp_does_not_see_a_constant_in_the_reward(seed: int, constant: int) -> None:
    """Without a critic every token gets the constant, and the mean over tokens takes it off again."""
    batch = random_batch(seed)
    plain = TokenBatch(rewards=batch.rewards, kept=batch.kept, policy_logprobs=batch.policy_logprobs)
    moved = TokenBatch(rewards=batch.rewards + constant, kept=batch.kept, policy_logprobs=batch.policy_logprobs)
    options = {"discount": 1.0, "gae_lambda": 1.0, "kl_weight": 0.0, "is_whitened": True}
    before, after = targets(plain, **options), targets(moved, **options)
    kept = before.advantages[before.mask]
    if kept.size and np.ptp(batch.rewards[batch.kept]) > 1e-3:  # else the deviation itself is rounding
        np.testing.assert_allclose(after.advantages, before.advantages, atol=1e-6)
