"""Levels 1 and 2: groupings, compositions, arms; halving over them."""

import math

import numpy as np
import pytest

from plans.cost import CostModel
from plans.search.arms import arms_by_grouping, unit_of
from plans.search.compositions import compositions, proportional_composition
from plans.search.degrees import all_degrees, pp_degrees, tp_degrees
from plans.search.groupings import set_partitions, task_groupings
from plans.search.problem import Problem
from plans.search.successive_halving import NestedHalving, least_budget, rounds_of
from plans.spec.job import Algorithm, Mode
from plans.spec.llm import BUILT_IN_SHAPES
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from plans.workflow import RlTask, workflow_of

BELL = [1, 1, 2, 5, 15, 52, 203]


@pytest.mark.parametrize("count", range(7))
def test_set_partitions_are_counted_by_bell_numbers(count):
    found = list(set_partitions(range(count)))
    assert len(found) == len(set(found)) == BELL[count]
    assert all(sorted(item for block in partition for item in block) == list(range(count)) for partition in found)


@pytest.mark.parametrize(
    ("algorithm", "mode", "expected"),
    [("ppo", "sync", 203), ("grpo", "sync", 15), ("ppo", "async", 52), ("grpo", "async", 5)],
)
def test_groupings_number_as_the_paper_says(algorithm, mode, expected):
    groupings = task_groupings(workflow_of(hetrl_job("4b", Algorithm(algorithm), Mode(mode))))
    assert len(groupings) == expected
    if mode == "async":
        assert all((RlTask.ACTOR_GENERATION,) in grouping for grouping in groupings)


def test_proportional_composition_respects_minimum_and_total():
    assert proportional_composition([6.0, 1.0, 1.0], [1, 1, 3], 16) == (11, 2, 3)


def test_proportional_composition_is_none_when_minima_exceed_the_total():
    assert proportional_composition([1.0, 1.0], [5, 6], 10) is None


def test_compositions_are_bounded_and_keep_the_proportional_one():
    rng = np.random.default_rng(0)
    found = compositions([5.0, 2.0, 1.0, 1.0], [2, 2, 2, 2], 1024, unit=16, cap=12, rng=rng)
    assert len(found) == len(set(found)) == 12
    assert found[0] == proportional_composition([5.0, 2.0, 1.0, 1.0], [2, 2, 2, 2], 1024)
    assert all(sum(sizes) == 1024 and min(sizes) >= 2 for sizes in found)


def test_arms_stay_bounded_at_1024_gpus():
    problem = Problem(
        find_testbed("scaling-1024").cluster, hetrl_job("8b", Algorithm.PPO, Mode.SYNC), CostModel.paper()
    )
    arms = arms_by_grouping(problem, 0, cap=8)
    assert len(arms) == 203
    assert max(len(entry) for entry in arms) == 8
    assert all(sum(arm.sizes) == 1024 for entry in arms for arm in entry)


def test_arms_drop_groupings_whose_memory_cannot_fit():
    problem = Problem(
        find_testbed("hetrl-single-region-8").cluster, hetrl_job("8b", Algorithm.GRPO, Mode.SYNC), CostModel.paper()
    )
    arms = arms_by_grouping(problem, 0, cap=4)
    assert 0 < sum(len(entry) for entry in arms) < 15 * 4
    for entry in arms:
        for arm in entry:
            assert all(size >= problem.least_gpus(t) for t, size in zip(arm.grouping, arm.sizes, strict=True))


@pytest.mark.parametrize(("num_gpus", "unit"), [(8, 1), (24, 2), (64, 4), (256, 8), (1024, 16), (4096, 64)])
def test_unit_grows_with_the_cluster(num_gpus, unit):
    assert unit_of(num_gpus) == unit


def test_tp_degrees_divide_heads_and_mlp():
    assert tp_degrees(BUILT_IN_SHAPES["qwen3-14b"], 64) == (1, 2, 4, 8)
    assert tp_degrees(BUILT_IN_SHAPES["qwen3-8b"], 24) == (1, 2, 4, 8, 16)


def test_pp_degrees_are_thinned_at_the_high_end():
    degrees = pp_degrees(BUILT_IN_SHAPES["qwen3-14b"], 500, most=10)
    assert degrees[:4] == (1, 2, 3, 4)
    assert degrees[-1] == 40
    assert len(degrees) <= 11


def test_all_degrees_fit_the_gpus():
    found = all_degrees(BUILT_IN_SHAPES["qwen3-8b"], 6)
    assert len(found) == len(set(found))
    assert all(dp * pp * tp <= 6 for dp, pp, tp in found)
    assert {(6, 1, 1), (1, 6, 1), (1, 1, 4), (3, 1, 2)} <= set(found)


def test_halving_keeps_the_best_arm_and_spends_equal_shares():
    spent: dict[int, int] = {}
    total = least_budget(4, 4, 3)

    def grow(jobs):
        for arm, count in jobs:
            spent[arm] = spent.get(arm, 0) + count

    halving = NestedHalving(
        grow, lambda arm: (float(arm),), lambda: total - sum(spent.values()), lambda: sum(spent.values()) < total
    )
    survivors = halving.run([[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    assert survivors[0] == 0
    assert sum(spent.values()) <= total
    assert spent[0] > spent[3] > 0
    assert spent[0] > spent[30]


@pytest.mark.parametrize(("count", "rounds"), [(1, 1), (2, 1), (3, 2), (203, 8)])
def test_rounds_are_log2_and_at_least_one(count, rounds):
    assert rounds_of(count) == rounds == max(1, math.ceil(math.log2(count)))
