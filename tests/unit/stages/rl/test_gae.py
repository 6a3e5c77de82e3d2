"""GAE, token rewards, whitening and the KL controller, hand-derived."""

from __future__ import annotations

import numpy as np
import pytest

from stages.rl.adaptive_kl import next_kl_weight
from stages.rl.gae import explained_variance, gae, token_rewards, whiten
from stages.rl.overlong import soft_overlong_penalty

FULL = np.ones((1, 3), bool)


def test_gae_of_three_tokens_equals_the_hand_computed_sums() -> None:
    # discount 0.5, lambda 0.5; rewards 0 0 1, values 1 2 3.
    # delta = [0 + .5*2 - 1, 0 + .5*3 - 2, 1 + 0 - 3] = [0, -.5, -2]; A3 = -2; A2 = -.5 - .5 = -1; A1 = 0 - .25.
    result = gae(np.array([[0.0, 0, 1]]), np.array([[1.0, 2, 3]]), FULL, discount=0.5, gae_lambda=0.5)
    assert result.advantages.tolist() == [[-0.25, -1.0, -2.0]]
    assert result.returns.tolist() == [[0.75, 1.0, 1.0]]


def test_gae_steps_over_tokens_outside_the_mask() -> None:
    # The chain goes from token 0 to token 2 as if token 1 weren't there: delta0 = 0 + 3 - 1 = 2, A2 = 1 - 3 = -2.
    rewards, values = np.array([[0.0, 99, 1]]), np.array([[1.0, np.nan, 3]])
    result = gae(rewards, values, np.array([[True, False, True]]), discount=1.0, gae_lambda=1.0)
    assert result.advantages.tolist() == [[0.0, 0.0, -2.0]]


def test_gae_of_a_cut_response_bootstraps_from_the_next_value() -> None:
    result = gae(
        np.zeros((1, 1)), np.array([[1.0]]), np.ones((1, 1), bool), discount=0.5, gae_lambda=0.9,
        bootstrap_values=np.array([4.0]),
    )  # fmt: skip
    assert result.advantages.tolist() == [[1.0]]


def test_token_rewards_puts_the_reward_at_the_last_unmasked_token_and_kl_everywhere() -> None:
    mask = np.array([[True, True, False], [False, False, False]])
    kl = np.array([[1.0, 2.0, np.nan], [1.0, 1.0, 1.0]])
    result = token_rewards(np.array([10.0, 7.0]), mask, kl, 0.5)
    assert result.tolist() == [[-0.5, 9.0, 0.0], [0.0, 0.0, 0.0]]


def test_whiten_gives_mean_zero_and_std_one_over_the_mask() -> None:
    result = whiten(np.array([[1.0, 3.0, np.nan]]), np.array([[True, True, False]]))
    assert result == pytest.approx(np.array([[-1.0, 1.0, 0.0]]))


def test_whiten_of_constant_or_no_advantages_is_zero() -> None:
    assert whiten(np.array([[2.0, 2.0]]), np.array([[True, True]])).tolist() == [[0.0, 0.0]]
    assert whiten(np.array([[2.0, 2.0]]), np.array([[False, False]])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0), ([11.0, 13.0], 1.0)]
)
def test_explained_variance_of_returns_one_and_three(values: list[float], expected: float) -> None:
    # Returns 1 and 3 have variance 1; the reversed values leave errors -2 and 2, variance 4.
    mask = np.array([[True, True, False]])
    assert explained_variance(np.array([[*values, np.nan]]), np.array([[1.0, 3.0, np.nan]]), mask) == expected


def test_explained_variance_of_constant_or_no_returns_is_zero() -> None:
    assert explained_variance(np.array([[1.0, 2.0]]), np.array([[5.0, 5.0]]), np.array([[True, True]])) == 0.0
    assert explained_variance(np.array([[1.0]]), np.array([[5.0]]), np.array([[False]])) == 0.0


def test_kl_controller_moves_at_most_a_fifth_of_the_batch_share() -> None:
    # kl ten times the target: error clipped to 0.2; 100 of 1000 samples: factor 1.02.
    assert next_kl_weight(0.1, 60, target_kl=6, horizon_samples=1000, num_samples=100) == pytest.approx(0.102)
    assert next_kl_weight(0.1, 6, target_kl=6, horizon_samples=1000, num_samples=100) == pytest.approx(0.1)


def test_overlong_penalty_falls_linearly_over_the_buffer() -> None:
    lengths = np.array([0, 6, 8, 10, 12])
    result = soft_overlong_penalty(lengths, max_response_tokens=10, buffer_tokens=4, factor=2.0)
    assert result.tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]


def test_overlong_penalty_without_buffer_is_zero() -> None:
    result = soft_overlong_penalty(np.array([0, 10]), max_response_tokens=10, buffer_tokens=0, factor=2.0)
    assert result.tolist() == [0.0, 0.0]
