"""Token advantages and the critic's targets, by hand; numpy only."""

from __future__ import annotations

import numpy as np
import pytest

from stages.rl.token_targets import KL_ESTIMATORS, TokenBatch, token_targets

PLAIN = {"discount": 1.0, "gae_lambda": 1.0, "kl_estimator": "k1", "kl_weight": 0.0, "is_whitened": False}


def batch(**changes: object) -> TokenBatch:
    fields: dict[str, object] = {
        "rewards": np.array([1.0, 0.0]),
        "kept": np.array([True, True]),
        "policy_logprobs": [[-0.5, -1.0], [-2.0]],
    }
    return TokenBatch(**{**fields, **changes})  # type: ignore[arg-type]


def test_without_critic_and_penalty_every_token_gets_the_reward_of_its_response() -> None:
    found = token_targets(batch(), **PLAIN)
    assert found.advantages.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert found.mask.tolist() == [[True, True], [True, False]]
    assert found.advantages_of(1) == [0.0]
    assert found.kl_per_response is None


def test_gae_by_hand_with_values_discount_and_lambda() -> None:
    """V = [.5, .25], r = [0, 1], gamma .5, lambda .5: d1 = 1 - .25 = .75; d0 = .5 * .25 - .5 = -.375.

    A1 = .75, A0 = -.375 + .25 * .75 = -.1875; returns = A + V = [.3125, 1].
    """
    found = token_targets(
        batch(values=[[0.5, 0.25], [0.0]]), **{**PLAIN, "discount": 0.5, "gae_lambda": 0.5}
    )  # fmt: skip
    assert found.advantages_of(0) == [-0.1875, 0.75]
    assert found.returns_of(0) == [0.3125, 1.0]
    assert found.values_of(0) == [0.5, 0.25]


def test_penalty_in_the_reward_is_taken_at_every_token_and_measured_per_response() -> None:
    """Log-ratios [.5, -.25] and [1], weight .1: rewards [-.05, 1.025] and [-.1]; suffix sums [.975, 1.025], [-.1]."""
    reference = [[-1.0, -0.75], [-3.0]]
    found = token_targets(batch(reference_logprobs=reference), **{**PLAIN, "kl_weight": 0.1})
    assert found.advantages_of(0) == pytest.approx([0.975, 1.025])
    assert found.advantages_of(1) == pytest.approx([-0.1])
    assert found.kl_per_response == pytest.approx((0.25 + 1.0) / 2)


def test_rows_left_out_move_neither_whitening_nor_measured_kl() -> None:
    """N12: what a dropped row holds is never read."""
    alone = token_targets(
        batch(rewards=np.array([1.0]), kept=np.array([True]), policy_logprobs=[[-0.5, -1.0]], values=[[0.2, 0.4]],
              reference_logprobs=[[-0.6, -1.1]]),
        **{**PLAIN, "is_whitened": True},
    )  # fmt: skip
    beside = token_targets(
        batch(rewards=np.array([1.0, np.nan]), kept=np.array([True, False]), values=[[0.2, 0.4], [99.0]],
              reference_logprobs=[[-0.6, -1.1], [50.0]]),
        **{**PLAIN, "is_whitened": True},
    )  # fmt: skip
    assert beside.advantages_of(0) == alone.advantages_of(0)
    assert (beside.advantages_of(1), beside.returns_of(1)) == ([], [])
    assert beside.kl_per_response == alone.kl_per_response
    assert beside.explained_variance == alone.explained_variance


def test_whitened_advantages_have_mean_zero_and_unit_deviation_over_tokens() -> None:
    found = token_targets(
        batch(rewards=np.array([1.0, -3.0]), values=[[0.1, 0.7], [0.3]]), **{**PLAIN, "is_whitened": True}
    )
    tokens = found.advantages[found.mask]
    assert tokens.mean() == pytest.approx(0.0, abs=1e-12)
    assert tokens.std() == pytest.approx(1.0, abs=1e-6)
    assert found.row_means()[0] == pytest.approx(tokens[:2].mean())


def test_values_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 2 values for 1 sampled tokens"):
        token_targets(batch(values=[[0.0, 0.0], [0.0, 0.0]]), **PLAIN)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_n1_penalty_of_a_huge_log_ratio_is_finite_and_that_of_none_is_zero(name: str) -> None:
    found = KL_ESTIMATORS[name](np.array([-1e3, 1e3, 0.0]))
    assert np.isfinite(found).all()
    assert found[2] == 0.0
