"""REINFORCE++ advantages from the hand derivation in the docstrings; numpy only."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from stages.rl.advantages import estimate_advantages
from stages.rl.spec import AdvantageSpec, GrpoSpec
from stages.rl.token_targets import TokenBatch, token_targets

SPEC = AdvantageSpec(estimator="reinforce_pp", normalisation="none")
BASELINE = AdvantageSpec(estimator="reinforce_pp_baseline", normalisation="none")
REWARDS = np.array([1.0, 1.0, 0.0, 2.0])
GROUPS = ["a", "a", "b", "b"]


def test_plain_form_keeps_rewards_even_of_groups_without_variance() -> None:
    found = estimate_advantages(REWARDS, np.ones(4, bool), GROUPS, SPEC)
    assert found.values.tolist() == [1.0, 1.0, 0.0, 2.0]
    assert (found.num_groups, found.num_zero_variance_groups) == (2, 1)


def test_baseline_form_takes_the_group_mean_off() -> None:
    found = estimate_advantages(REWARDS, np.ones(4, bool), GROUPS, BASELINE)
    assert found.values.tolist() == [0.0, 0.0, -1.0, 1.0]


def test_batch_normalisation_weighs_by_tokens() -> None:
    """Rewards 1 (1 token) and 0 (3 tokens): mean 1/4, variance 3/16; advantages .75 / s and -.25 / s, s = .4330."""
    found = token_targets(
        TokenBatch(rewards=np.array([1.0, 0.0]), kept=np.ones(2, bool), policy_logprobs=[[-1.0], [-1.0] * 3]),
        discount=1.0, gae_lambda=1.0, kl_estimator="k1", kl_weight=0.0, is_whitened=True,
    )  # fmt: skip
    deviation = (3 / 16) ** 0.5
    assert found.advantages_of(0) == pytest.approx([0.75 / deviation], rel=1e-6)
    assert found.advantages_of(1) == pytest.approx([-0.25 / deviation] * 3, rel=1e-6)


def test_n11_order_of_rows_changes_nothing() -> None:
    order = np.array([2, 0, 3, 1])
    found = estimate_advantages(REWARDS[order], np.ones(4, bool), [GROUPS[i] for i in order], BASELINE)
    straight = estimate_advantages(REWARDS, np.ones(4, bool), GROUPS, BASELINE)
    assert found.values.tolist() == straight.values[order].tolist()


def test_second_normalisation_is_refused() -> None:
    with pytest.raises(ValidationError, match="normalises over all tokens"):
        AdvantageSpec(estimator="reinforce_pp", normalisation="std")


def test_variants_put_the_penalty_where_the_paper_does() -> None:
    plain = GrpoSpec.model_validate({"loss": "reinforce_pp", "kl": {"weight": 0.01}})
    baseline = GrpoSpec.model_validate({"loss": "reinforce_pp_baseline", "kl": {"weight": 0.01}})
    assert (plain.kl.place, plain.kl.estimator, plain.kl.weight) == ("reward", "k1", 0.01)
    assert (baseline.kl.place, baseline.kl.estimator) == ("loss", "k2")
    assert not plain.drop_zero_variance_groups


def test_penalty_in_the_reward_of_a_whole_response_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"kl\.place is reward"):
        GrpoSpec.model_validate({"loss": "grpo", "kl": {"weight": 0.1, "place": "reward"}})
