"""Sums of speeds over replicas against enumeration of every mix and every split."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from plans.search.ilp.replicas import CellTimes, MixTable, speeds_of
from plans.search.ilp.splits import best_shared_split, shared_split_sums

LAYERS = 7
#: Seconds per layer of two machines, and the most layers that they hold as inner, first, last, only stage.
LAYER_S, MOST = (1.0, 2.5), ((6, 3), (5, 2), (5, 2), (5, 2))


def cells(pp: int) -> CellTimes:
    transfer = np.full((1, 2), 0.25 if pp > 1 else 0.0)
    head = np.full((1, 1, 2), 0.25)
    return CellTimes(np.array([[LAYER_S]]), head, transfer, np.array([MOST], dtype=np.float64))


def row_s(row: tuple[int, ...], split: tuple[int, ...]) -> float:
    """Seconds per sample of a replica on machines `row` with layers `split`; infinite where memory is short."""
    last = len(row) - 1
    for j, (machine, layers) in enumerate(zip(row, split, strict=True)):
        if layers > MOST[0 if 0 < j < last else 1 if j == 0 else 2][machine]:
            return np.inf
    return max(layers * LAYER_S[machine] for machine, layers in zip(row, split, strict=True)) + 0.25


def splits(pp: int) -> list[tuple[int, ...]]:
    return [split for split in product(range(1, LAYERS + 1), repeat=pp) if sum(split) == LAYERS]


def enumerated(dp: int, pp: int, counts: tuple[int, int], *, shared: bool) -> float:
    """Largest sum of speeds over all placements; each replica with its own split unless they share one."""
    best = -np.inf
    rows = list(product((0, 1), repeat=pp))
    for chosen in product(rows, repeat=dp):
        used = [sum(row.count(m) for row in chosen) for m in (0, 1)]
        if tuple(used) != counts:
            continue
        if shared:
            sums = [sum(1.0 / row_s(row, split) for row in chosen) for split in splits(pp)
                    if all(np.isfinite(row_s(row, split)) for row in chosen)]  # fmt: skip
            best = max(best, *sums) if sums else best
        else:
            times = [min(row_s(row, split) for split in splits(pp)) for row in chosen]
            if np.isfinite(times).all():
                best = max(best, sum(1.0 / seconds for seconds in times))
    return best


@pytest.mark.parametrize(("dp", "pp"), [(2, 2), (3, 2), (2, 3), (1, 4)])
def test_sums_are_at_least_those_of_every_placement_and_shared_ones_exact(dp: int, pp: int) -> None:
    table = MixTable(pp, 1, (6, 6))
    sums = table.sums(speeds_of(cells(pp).mix_s(table.mixes, LAYERS)[0]), dp)
    shared = shared_split_sums(cells(pp), table, dp, LAYERS, 1e-9)
    assert shared is not None
    for first in range(max(0, dp * pp - 6), min(6, dp * pp) + 1):
        counts = (first, dp * pp - first)
        own = float(table.at(sums, counts))
        exact = enumerated(dp, pp, counts, shared=True)
        assert own >= enumerated(dp, pp, counts, shared=False) * (1.0 - 1e-9)
        assert max(float(table.at(shared, counts)), 1e-9) == pytest.approx(max(exact, 1e-9), rel=1e-9)


def test_the_split_read_back_reaches_its_sum() -> None:
    table = MixTable(2, 1, (6, 6))
    grid = best_shared_split(cells(2), table, 3, LAYERS, (3, 3))
    assert grid is not None
    assert sorted(machine for row in grid for machine in row) == [0, 0, 0, 1, 1, 1]
    reached = max(sum(1.0 / row_s(row, split) for row in grid) for split in splits(2))
    assert reached == pytest.approx(enumerated(3, 2, (3, 3), shared=True), rel=1e-9)


def test_a_table_without_room_has_no_sum() -> None:
    table = MixTable(2, 1, (6, 6))
    sums = table.sums(np.full(len(table.mixes), -np.inf), 2)
    assert float(table.at(sums, (2, 2))) == -np.inf


def test_cells_over_several_machines_take_what_is_left() -> None:
    table = MixTable(1, 2, (3, 3))
    # Mixes by type: machine 0, machine 1, spread.
    speeds = np.array([{(1, 0, 0): 4.0, (0, 1, 0): 2.0, (0, 0, 1): 1.0}[tuple(mix)] for mix in table.mixes.tolist()])
    sums = table.sums(speeds, 3)
    assert float(table.at(sums, (3, 3))) == 4.0 + 2.0 + 1.0
