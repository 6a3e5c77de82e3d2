"""Group-relative and leave-one-out advantages, hand-derived."""

from __future__ import annotations

import numpy as np
import pytest

from stages.rl.advantages import estimate_advantages
from stages.rl.spec import AdvantageSpec

ALL = np.ones(4, dtype=bool)
PLAIN = AdvantageSpec(normalisation="none")


def values(
    rewards: list[float], groups: list[object], spec: AdvantageSpec, valid: list[bool] | None = None
) -> list[float]:
    mask = np.ones(len(rewards), bool) if valid is None else np.array(valid)
    return estimate_advantages(np.array(rewards), mask, groups, spec).values.tolist()


def test_n5_std_normalisation_of_one_success_in_four_gives_one_and_a_half() -> None:
    # mean 1/4; sample std = sqrt((9/16 + 3 * 1/16) / 3) = 1/2; (3/4) / (1/2) = 1.5
    spec = AdvantageSpec(normalisation="std", eps=1e-6)
    assert values([1, 0, 0, 0], ["g"] * 4, spec) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_n5_leave_one_out_with_std_of_one_success_in_four_stays_bounded() -> None:
    # Leave-one-out differences 1, -1/3, -1/3, -1/3 over the whole group's std 1/2; the std of the others would be 0.
    spec = AdvantageSpec(estimator="rloo", normalisation="std", eps=1e-6)
    assert values([1, 0, 0, 0], ["g"] * 4, spec) == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3], abs=1e-5)


def test_n5_std_floor_bounds_the_advantages_of_a_nearly_constant_group() -> None:
    spec = AdvantageSpec(normalisation="std", eps=1e-6, std_floor=0.1)
    result = values([1, 1, 1, 1 + 1e-6], ["g"] * 4, spec)
    assert max(abs(value) for value in result) < 1e-5


def test_n7_groups_without_signal_are_counted_flagged_and_zero() -> None:
    rewards = np.array([0.1, 0.1, 0.1, 1.0, 0.0, 5.0])
    result = estimate_advantages(rewards, np.ones(6, bool), ["a", "a", "a", "b", "b", "c"], AdvantageSpec())
    assert (result.num_groups, result.num_zero_variance_groups, result.num_empty_groups) == (3, 2, 0)
    assert result.zero_variance.tolist() == [True, True, True, False, False, True]
    assert result.has_signal.tolist() == [False, False, False, True, True, False]
    assert result.values[[0, 1, 2, 5]].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_n8_two_groups_of_one_prompt_stay_two_groups() -> None:
    # 16 zeros and 16 ones: each group is constant, so nothing is learned; merged they would give -1 and +1.
    rewards = [0.0] * 16 + [1.0] * 16
    groups = [("prompt-7", 0)] * 16 + [("prompt-7", 1)] * 16
    assert values(rewards, groups, AdvantageSpec()) == [0.0] * 32


def test_n12_invalid_row_does_not_shift_the_baseline() -> None:
    # Valid rewards 1, 3, 2 have mean 2; the failed row's 0 isn't read.
    assert values([1, 3, 2, 0], ["g"] * 4, PLAIN, [True, True, True, False]) == [-1, 1, 0, 0]


def test_invalid_row_holding_nan_is_not_read() -> None:
    assert values([1, 3, 2, float("nan")], ["g"] * 4, PLAIN, [True, True, True, False]) == [-1, 1, 0, 0]


def test_group_without_valid_rows_is_counted_as_empty() -> None:
    result = estimate_advantages(np.zeros(2), np.zeros(2, bool), ["g", "g"], AdvantageSpec())
    assert (result.num_groups, result.num_empty_groups, result.values.tolist()) == (0, 1, [0.0, 0.0])


def test_dr_grpo_advantage_is_the_plain_difference() -> None:
    assert values([1, 0, 0, 0], ["g"] * 4, PLAIN) == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_is_reward_minus_mean_of_the_others() -> None:
    # 4 - (1 + 1) / 2 = 3; 1 - (4 + 1) / 2 = -1.5
    spec = AdvantageSpec(estimator="rloo", normalisation="none")
    assert values([4, 1, 1], ["g"] * 3, spec) == pytest.approx([3, -1.5, -1.5])


def test_batch_std_divides_by_the_std_of_all_valid_rewards() -> None:
    # Rewards 0, 2, 4, 6: sample variance (9 + 1 + 1 + 9) / 3 = 20 / 3.
    spec = AdvantageSpec(normalisation="batch_std", eps=1e-12)
    std = (20 / 3) ** 0.5
    assert values([0, 2, 4, 6], ["a", "a", "b", "b"], spec) == pytest.approx([-1 / std, 1 / std, -1 / std, 1 / std])


def test_valid_reward_that_is_not_finite_is_refused_with_its_row() -> None:
    with pytest.raises(ValueError, match=r"1 valid reward\(s\) are not finite, first at row 2: nan"):
        estimate_advantages(np.array([0, 1, np.nan, 0]), ALL, ["g"] * 4, PLAIN)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per row"):
        estimate_advantages(np.zeros(4), ALL, ["g"] * 3, PLAIN)
