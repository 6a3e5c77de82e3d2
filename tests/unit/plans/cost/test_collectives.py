"""Best rings and link times."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from plans.cost.collectives import LinkTimes, best_ring


def brute_force(counts: list[int], cost: np.ndarray) -> float:
    gpus = [machine for machine, count in enumerate(counts) for _ in range(count)]
    if len(gpus) == 1:
        return 0.0
    first, *rest = gpus
    return min(
        max(float(cost[a, b]) for a, b in zip((first, *order), (*order, first), strict=True))
        for order in set(permutations(rest))
    )


@pytest.mark.parametrize("seed", range(60))
def test_best_ring_equals_brute_force_on_random_machines(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 5))
    counts = [int(c) for c in rng.integers(1, 3, size=k)]
    cost = rng.choice([1.0, 2.0, 3.0, 4.0, 5.0, np.inf], size=(k, k), p=[0.2, 0.2, 0.2, 0.15, 0.15, 0.1])
    cost = np.maximum(cost, cost.T)
    solution = best_ring(counts, cost)
    assert (solution.bottleneck_s, solution.is_proved) == (brute_force(counts, cost), True)


@pytest.mark.parametrize("seed", range(10))
def test_best_ring_equals_brute_force_on_eight_single_gpus(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = np.triu(rng.uniform(1, 2, size=(8, 8)), 1)
    cost = cost + cost.T
    solution = best_ring([1] * 8, cost)
    assert (solution.bottleneck_s, solution.is_proved) == (brute_force([1] * 8, cost), True)


def test_hub_with_two_gpus_joins_machines_that_have_no_link() -> None:
    cost = np.array([[1.0, 2.0, 2.0], [2.0, 1.0, np.inf], [2.0, np.inf, 1.0]])
    assert best_ring([2, 1, 1], cost).bottleneck_s == 2.0
    assert best_ring([1, 1, 1], cost).bottleneck_s == np.inf


def test_slow_inner_link_is_avoided_by_alternating() -> None:
    cost = np.array([[9.0, 1.0], [1.0, 9.0]])
    assert best_ring([2, 2], cost).bottleneck_s == 1.0
    assert best_ring([3, 2], cost).bottleneck_s == 9.0


def test_large_ring_over_sixteen_machines_is_a_valid_upper_bound() -> None:
    rng = np.random.default_rng(5)
    cost = np.triu(rng.uniform(1, 2, size=(16, 16)), 1)
    cost = cost + cost.T
    found = best_ring([1] * 16, cost).bottleneck_s
    second_fastest = [float(np.sort(cost[i])[2]) for i in range(16)]  # the zero diagonal comes first
    in_order = max(float(cost[i, (i + 1) % 16]) for i in range(16))
    assert max(second_fastest) <= found <= in_order


def test_latency_is_charged_once_in_paper_mode_and_per_step_when_calibrated() -> None:
    latency, inverse = np.array([[0.0, 0.1], [0.1, 0.0]]), np.array([[0.0, 1e-9], [1e-9, 0.0]])
    once = LinkTimes(latency, inverse, latency_per_step=False)
    stepwise = LinkTimes(latency, inverse, latency_per_step=True)
    assert once.ring_s((0, 1, 1), 1e9) == pytest.approx(1.1)
    assert stepwise.ring_s((0, 1, 1), 1e9) == pytest.approx(4 * 0.1 + 1.0)


def test_pair_takes_the_cheapest_link() -> None:
    latency, inverse = np.array([[0.0, 0.1], [0.1, 0.0]]), np.array([[1e-10, 1e-9], [1e-9, 1e-10]])
    links = LinkTimes(latency, inverse, latency_per_step=False)
    assert links.pair_s(frozenset({0}), frozenset({1}), 1e9) == pytest.approx(1.1)
    assert links.pair_s(frozenset({0, 1}), frozenset({1}), 1e9) == pytest.approx(0.1)


@pytest.mark.parametrize("counts", [[2, 1], [1, 3], [2, 2], [3, 2], [2, 2, 2], [1, 3, 2], [1, 1, 1, 3]])
@pytest.mark.parametrize("seed", range(8))
def test_best_ring_equals_brute_force_when_many_edges_are_equal(counts: list[int], seed: int) -> None:
    cost = np.random.default_rng(seed).choice([1.0, 2.0, 3.0], size=(len(counts), len(counts)))
    cost = np.maximum(cost, cost.T)
    assert best_ring(counts, cost).bottleneck_s == brute_force(counts, cost)


def test_machines_of_a_region_act_as_one_in_large_rings() -> None:
    # 128 machines in four regions on a line: the best ring goes out and back over neighbouring regions.
    region = np.repeat(np.arange(4), 32)
    cost = np.where(region[:, None] == region[None, :], 1.0, 5.0 + np.abs(region[:, None] - region[None, :]))
    solution = best_ring([8] * 128, cost)
    assert (solution.bottleneck_s, solution.is_proved) == (6.0, True)
