"""The makespan of free overlap, worked out by hand."""

from __future__ import annotations

import pytest

from plans.cost.overlap import free_overlap_s, makespan_s
from plans.spec.job import Mode
from plans.workflow import RlTask

REWARD, REFERENCE, CRITIC = RlTask.REWARD_INFERENCE, RlTask.REFERENCE_INFERENCE, RlTask.CRITIC_INFERENCE
SECONDS = {REWARD: 3.0, REFERENCE: 4.0, CRITIC: 5.0}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ({REWARD: {0}, REFERENCE: {1}, CRITIC: {2}}, 5.0),  # all side by side
        ({REWARD: {0}, REFERENCE: {0}, CRITIC: {0}}, 12.0),  # one after the other
        ({REWARD: {0}, REFERENCE: {0}, CRITIC: {2}}, 7.0),  # 3 + 4 beside 5
        ({REWARD: {0, 1}, REFERENCE: {0}, CRITIC: {1}}, 8.0),  # 3 first, then 4 beside 5
        ({REWARD: {0}, REFERENCE: {1}, CRITIC: {0, 1}}, 9.0),  # 5 first, then 3 beside 4
        ({}, 5.0),  # nothing known: nothing shared
    ],
)
def test_tasks_wait_only_for_those_that_share_a_gpu(gpus: dict[RlTask, set[int]], expected: float) -> None:
    assert makespan_s(SECONDS, gpus) == expected


def test_iteration_is_the_sum_when_synchronous_and_the_longer_side_when_not() -> None:
    seconds = {RlTask.ACTOR_GENERATION: 10.0, REWARD: 3.0, REFERENCE: 4.0, RlTask.ACTOR_TRAINING: 8.0}
    gpus = {RlTask.ACTOR_GENERATION: {9}, REWARD: {0}, REFERENCE: {1}, RlTask.ACTOR_TRAINING: {0, 1}}
    assert free_overlap_s(Mode.SYNC, seconds, gpus, 1.5) == 10.0 + 4.0 + 8.0 + 1.5
    assert free_overlap_s(Mode.ASYNC, seconds, gpus, 1.5) == 4.0 + 8.0 + 1.5


def test_a_job_without_inference_has_an_empty_phase() -> None:
    assert makespan_s({}, {}) == 0.0
