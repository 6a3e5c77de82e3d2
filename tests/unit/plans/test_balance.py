"""Load balancing against brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from plans.balance import balance_layers, balance_samples, dispatch_by_length, proportional_shares
from plans.cost import CostModel, PlanEvaluator
from plans.cost.balanced import with_balanced_layers, with_balanced_samples
from plans.errors import InfeasibleError
from plans.workflow import RlTask
from tests.helpers.planner_cases import hand_task, paper_cluster, paper_job


@pytest.mark.parametrize("seed", range(40))
def test_samples_equal_brute_force_for_stepwise_times(seed: int) -> None:
    rng = random.Random(seed)
    replicas = rng.randint(1, 4)
    total = rng.randint(replicas, 12)
    speed, step = [rng.uniform(0.2, 3) for _ in range(replicas)], [rng.randint(1, 4) for _ in range(replicas)]

    def finish_s(i: int, samples: int) -> float:
        return -(-samples // step[i]) * speed[i]

    shares = balance_samples(total, replicas, finish_s)
    best = min(max(map(finish_s, range(replicas), split))
               for split in itertools.product(range(1, total + 1), repeat=replicas) if sum(split) == total)  # fmt: skip
    assert (sum(shares), min(shares) >= 1) == (total, True)
    assert max(map(finish_s, range(replicas), shares)) == best


def test_samples_in_units_leave_no_sample_out() -> None:
    assert sum(balance_samples(103, 3, lambda i, b: b * (1.0 + i), unit=4)) == 103


@pytest.mark.parametrize("seed", range(40))
def test_layers_equal_brute_force_with_caps_and_fixed_times(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(1, 4)
    layers = rng.randint(stages, 11)
    rate, fixed = [rng.uniform(0.2, 3) for _ in range(stages)], [rng.uniform(0, 3) for _ in range(stages)]
    caps = [rng.randint(3, layers + 3) for _ in range(stages)]

    def slowest(split: tuple[int, ...]) -> float:
        return max(n * r + f for n, r, f in zip(split, rate, fixed, strict=True))

    options = [split for split in itertools.product(*(range(1, min(cap, layers) + 1) for cap in caps))
               if sum(split) == layers]  # fmt: skip
    if not options:
        with pytest.raises(InfeasibleError, match="cannot be cut"):
            balance_layers(layers, rate, fixed_s=fixed, caps=caps)
        return
    split = balance_layers(layers, rate, fixed_s=fixed, caps=caps)
    assert sum(split) == layers
    assert slowest(split) == pytest.approx(min(map(slowest, options)), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_dispatch_is_within_twice_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    lengths, speeds = [rng.randint(1, 100) for _ in range(7)], [rng.uniform(0.5, 3) for _ in range(3)]

    def finish(assignment: list[list[int]]) -> float:
        work = [sum(2.0 * lengths[i] + 0.1 * lengths[i] ** 2 for i in chosen) for chosen in assignment]
        return max(w / s for w, s in zip(work, speeds, strict=True))

    chosen = dispatch_by_length(lengths, speeds, linear=2.0, quadratic=0.1)
    best = min(finish([[i for i in range(7) if owner[i] == r] for r in range(3)])
               for owner in itertools.product(range(3), repeat=7))  # fmt: skip
    assert sorted(i for part in chosen for i in part) == list(range(7))
    assert finish([list(part) for part in chosen]) <= 2 * best


def test_long_samples_go_to_fast_replicas() -> None:
    assert dispatch_by_length([10, 100, 20], [1.0, 10.0], linear=1.0, quadratic=0.0) == ((0,), (1, 2))
    assert dispatch_by_length([10, 100, 90], [1.0, 1.5], linear=1.0, quadratic=0.0) == ((2,), (0, 1))


def test_token_caps_are_kept_or_refused() -> None:
    parts = dispatch_by_length([10, 10, 10], [1.0, 9.0], linear=1.0, quadratic=0.0, token_caps=[20, 10])
    assert [len(part) for part in parts] == [2, 1]
    with pytest.raises(InfeasibleError, match="sample 2 of 10 tokens fits on no replica"):
        dispatch_by_length([10, 10, 10], [1.0, 9.0], linear=1.0, quadratic=0.0, token_caps=[10, 10])


SHARES = [(10, [1, 1], (5, 5)), (10, [9, 1], (9, 1)), (3, [100, 1, 1], (1, 1, 1)), (7, [2, 1, 1], (3, 2, 2))]


@pytest.mark.parametrize(("total", "weights", "shares"), SHARES)
def test_proportional_shares_use_largest_remainders(total: int, weights: list[float], shares: tuple[int, ...]) -> None:
    assert proportional_shares(total, weights) == shares


def test_too_few_samples_are_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="2 cannot be shared among 3"):
        proportional_shares(2, [1.0, 1.0, 1.0])


def test_balancing_a_mixed_placement_lowers_its_cost() -> None:
    evaluator = PlanEvaluator(paper_cluster([("A100-40", "va", 8), ("L4", "va", 8)]), paper_job("qwen3-4b"),
                              CostModel.paper())  # fmt: skip
    even = hand_task(np.arange(16).reshape(8, 1, 2), [36], [384] * 8)
    balanced = with_balanced_samples(evaluator, RlTask.ACTOR_GENERATION, even, (256,) * 8)
    assert balanced.samples == (712, 712, 712, 712, 56, 56, 56, 56)
    stages = hand_task(np.array([0, 1, 8, 9]).reshape(1, 4, 1), [9] * 4, [3072])
    uneven = with_balanced_layers(evaluator, RlTask.ACTOR_TRAINING, stages)
    assert uneven.layers == (13, 13, 5, 5)
    before, after = (evaluator.task_s(RlTask.ACTOR_TRAINING, p) for p in (stages, uneven))
    assert after < 0.6 * before
