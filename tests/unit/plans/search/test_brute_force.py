"""Enumeration of placements, with and without symmetry."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from plans.cost.model import CostModel
from plans.search.brute_force import brute_force
from plans.search.brute_force_grids import Degrees, RankOrder, Stock, canonical_grids, every_grid
from plans.search.brute_force_walk import counts_of
from tests.helpers.exact_cases import bounded_brute_force, tiny_problem


def _grids(degrees: Degrees, fresh: tuple[tuple[int, ...], ...], order: RankOrder, named: tuple[int, ...] = (),
           counts: tuple[int, ...] | None = None) -> list[tuple[int, ...]]:  # fmt: skip
    machine_of = [0, 0, 1, 1]
    return list(canonical_grids(degrees, Stock(named, fresh), machine_of, order, counts))


def test_canonical_grids_of_replicas_on_fresh_gpus_are_multisets_of_machines() -> None:
    assert _grids(Degrees(2, 1, 1), ((0, 1), (2, 3)), RankOrder.ALL) == [(0, 1), (0, 2), (2, 3)]


def test_canonical_grids_of_stages_are_sequences_of_machines() -> None:
    assert _grids(Degrees(1, 2, 1), ((0, 1), (2, 3)), RankOrder.ALL) == [(0, 1), (0, 2), (2, 0), (2, 3)]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (RankOrder.NONE, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        (RankOrder.BY_MACHINE, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3), (3, 0), (3, 1)]),
        (RankOrder.ALL, list(permutations(range(4), 2))),
    ],
)
def test_canonical_grids_of_ranks_on_used_gpus_follow_the_rank_order(
    order: RankOrder, expected: list[tuple[int, ...]]
) -> None:
    assert sorted(_grids(Degrees(1, 1, 2), ((), ()), order, named=(0, 1, 2, 3))) == sorted(expected)


def test_canonical_grids_take_exactly_the_counts() -> None:
    assert _grids(Degrees(3, 1, 1), ((0, 1), (2, 3)), RankOrder.ALL, counts=(1, 2)) == [(0, 2, 3)]


def test_every_grid_is_every_arrangement() -> None:
    assert list(every_grid(Degrees(1, 2, 1), [4, 5])) == [(4, 5), (5, 4)]


def test_counts_of_a_total_respects_the_machines() -> None:
    assert list(counts_of(3, [2, 2])) == [(2, 1), (1, 2)]


@pytest.mark.parametrize("model", [CostModel.paper(), CostModel.calibrated()], ids=["paper", "calibrated"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_symmetry_and_pruning_do_not_change_the_optimum(model: CostModel, mode: str) -> None:
    problem = tiny_problem([("A100-40", "a", 1), ("L4", "b", 1)], mode=mode, model=model, memory_scale=0.4)
    plain = brute_force(problem, symmetric=False, prune=False).score_s
    assert math.isfinite(plain)
    found = [brute_force(problem).score_s, brute_force(problem, symmetric=False).score_s]
    assert [*found, bounded_brute_force(problem).score_s] == pytest.approx([plain] * 3, rel=1e-12)


def test_brute_force_without_a_fitting_plan_finds_none() -> None:
    problem = tiny_problem([("L4", "a", 1)], memory_scale=0.2)
    assert brute_force(problem).genome is None
