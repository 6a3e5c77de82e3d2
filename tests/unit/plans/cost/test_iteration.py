"""Phases to iteration."""

from __future__ import annotations

import pytest

from plans.cost.iteration import PhaseTimes, combine, phi
from plans.spec.job import Mode
from plans.workflow import RlTask

COSTS = {
    RlTask.ACTOR_GENERATION: 10.0,
    RlTask.REWARD_INFERENCE: 1.0,
    RlTask.REFERENCE_INFERENCE: 2.0,
    RlTask.CRITIC_INFERENCE: 4.0,
    RlTask.ACTOR_TRAINING: 8.0,
    RlTask.CRITIC_TRAINING: 5.0,
}
TOGETHER = dict.fromkeys(COSTS, 0)
APART = {task: index for index, task in enumerate(COSTS)}


def test_sync_in_one_group_adds_everything() -> None:
    """H3: moving the weights is part of the plan's price."""
    assert combine(Mode.SYNC, COSTS, TOGETHER, 0.5, None) == PhaseTimes(10.0, 7.0, 13.0, 0.5, 30.5)


def test_sync_in_groups_of_their_own_takes_the_longest_per_phase() -> None:
    assert combine(Mode.SYNC, COSTS, APART, 0.5, None) == PhaseTimes(10.0, 4.0, 8.0, 0.5, 22.5)


def test_sync_mixed_grouping_takes_the_group_with_the_largest_sum() -> None:
    groups = APART | {RlTask.REWARD_INFERENCE: 7, RlTask.REFERENCE_INFERENCE: 7}
    assert combine(Mode.SYNC, COSTS, groups, 0.0, None).inference_s == 4.0
    groups = groups | {RlTask.CRITIC_INFERENCE: 7}
    assert combine(Mode.SYNC, COSTS, groups, 0.0, None).inference_s == 7.0


@pytest.mark.parametrize(("generation_s", "iteration_s"), [(30.0, 30.5), (10.0, 12.5)])
def test_async_takes_the_longer_side(generation_s: float, iteration_s: float) -> None:
    costs = COSTS | {RlTask.ACTOR_GENERATION: generation_s}
    assert combine(Mode.ASYNC, costs, APART, 0.5, None).iteration_s == iteration_s


def test_eta_override_interpolates_between_sum_and_maximum() -> None:
    assert combine(Mode.SYNC, COSTS, APART, 0.0, 0.0).inference_s == 7.0
    assert combine(Mode.SYNC, COSTS, TOGETHER, 0.0, 1.0).inference_s == 4.0


def test_phi_of_no_task_is_zero() -> None:
    assert phi([], None) == 0.0
