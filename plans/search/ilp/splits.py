"""Speeds of replicas that share one layer split, as all replicas of a task do.

A split gives each pipeline stage its layers; the first and the last stage also hold vocabulary matrices, the order of
the others doesn't matter here. For a split and a mix of machines the best replica puts the small stages on the slow
machines: of the stages that the slowest type can hold, it takes those with fewest layers, then the next type does. That
is optimal because a faster type is taken to hold whatever a slower one does (its memory rounded up to that).
Splits are dropped that can't reach a wanted sum of speeds: with prices y of cells, dp replicas on given cells have at
most y . cells + dp * max over mixes of (speed - y . mix).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from plans.search.ilp.replicas import CellTimes, FloatArray, IntArray, MixTable, speeds_of

#: Splits of one pair of degrees beyond which they are not told apart.
MOST_SPLITS = 400_000
#: Splits worked on at a time, and states times splits of the dynamic program at a time.
CHUNK, MOST_ENTRIES = 8_192, 1_500_000
#: Splits read, and tried, when a class is turned into a layout.
MOST_READ, MOST_TRIED = 20_000, 60
INNER, FIRST, LAST = 0, 1, 2


def shared_split_sums(
    cells: CellTimes, table: MixTable, dp: int, num_layers: int, least_speed: float
) -> FloatArray | None:
    """Return the largest sum of speeds of dp replicas with one split, by cells used of each machine.

    Args:
        cells: the cells of the task [G = 1].
        table: mixes of a replica.
        dp: replicas.
        num_layers: layers to split.
        least_speed: sums of speeds below it are of no interest: where nothing reaches it, the entry is at most it.

    Returns:
        The sums as `MixTable.sums` has them, at least `least_speed` everywhere; None where the splits are too many.
    """
    layer_s = cells.layer_s[0].max(axis=0)
    order = np.argsort(-layer_s, kind="stable")
    most = np.maximum.accumulate(cells.most[0][:3, order], axis=1)
    # No stage has more layers than its type holds, nor more than leave all replicas together fast enough.
    limit = np.minimum(most[:, -1], np.floor(dp / (least_speed * layer_s.min()) + 1e-9)).astype(int)
    splits = _splits(table.pp, num_layers, limit)
    if splits is None:
        return None
    # What every stage but the last pays for its transfer, and the last for its head.
    fixed = min(float(cells.transfer_s[0].min()), float(cells.head_s[0].min()))
    mixes, speed_of_type = table.mixes[:, order], 1.0 / layer_s[order]
    prices = speed_of_type / num_layers
    have = float(prices.max()) * table.pp * dp if table.can_spread else _value(prices, order, table.cells)
    best: FloatArray | None = None
    for start in range(0, len(splits), CHUNK):
        part = splits[start : start + CHUNK]
        speeds = _speeds(part, mixes, layer_s[order], most, fixed)
        loss = (speeds - (mixes @ prices)[:, None]).max(axis=0)
        speeds = speeds[:, have + dp * loss >= least_speed]
        best = _merge(best, table, speeds, dp)
    floor = np.full(tuple(count + 1 for count in table.cells), least_speed)
    return floor if best is None else np.maximum(best, floor)


def best_shared_split(
    cells: CellTimes, table: MixTable, dp: int, num_layers: int, pure: tuple[int, ...]
) -> tuple[tuple[int, ...], ...] | None:
    """Return the machine of each stage of each replica [dp][pp] with the best split on exactly these cells.

    The first split in the order of enumeration wins ties; None where nothing fits, a cell would be spread, or the
    splits are too many.
    """
    layer_s = cells.layer_s[0].max(axis=0)
    order = np.argsort(-layer_s, kind="stable")
    most = np.maximum.accumulate(cells.most[0][:3, order], axis=1)
    if table.pp == 1:
        return tuple((machine,) for machine, count in enumerate(pure) for _ in range(count))
    splits = _splits(table.pp, num_layers, most[:, -1].astype(int))
    if splits is None or not len(splits):
        return None
    splits = _spaced(splits, MOST_READ)
    kept = [k for k, mix in enumerate(table.mixes) if mix[len(pure) :].sum() == 0]
    small = table.restricted(kept)
    mixes = small.mixes[:, order]
    speeds = _speeds(splits, mixes, layer_s[order], most, 0.0)
    prices = 1.0 / layer_s[order] / num_layers
    loss = (speeds - (mixes @ prices)[:, None]).max(axis=0)
    best: tuple[float, int] = (-np.inf, -1)
    for index in np.argsort(-loss, kind="stable")[:MOST_TRIED].tolist():
        total = float(small.sums(speeds[:, index], dp)[pure])
        best = max(best, (total, -index))
    if not np.isfinite(best[0]):
        return None
    split, speed = splits[-best[1]], speeds[:, -best[1]]
    return tuple(_stages_of(split, mixes[k], order, most) for k in small.trace(speed, dp, pure))


def _stages_of(split: IntArray, mix: IntArray, order: IntArray, most: FloatArray) -> tuple[int, ...]:
    """Return the machine of each stage: the slowest type takes the smallest stages that it holds, then the next."""
    kind = [INNER] * len(split)
    kind[0], kind[-1] = FIRST, LAST
    machines = [-1] * len(split)
    for t, count in enumerate(mix.tolist()):
        fitting = [
            j for j in np.argsort(split, kind="stable").tolist() if machines[j] < 0 and split[j] <= most[kind[j], t]
        ]
        for j in fitting[:count]:
            machines[j] = int(order[t])
    return tuple(machines)


def _spaced(splits: IntArray, most: int) -> IntArray:
    """Return at most so many of the splits, evenly spaced."""
    return splits if len(splits) <= most else splits[:: -(-len(splits) // most)]


def _value(prices: FloatArray, order: IntArray, cells: tuple[int, ...]) -> float:
    return float(sum(price * cells[machine] for price, machine in zip(prices, order, strict=True)))


def _merge(best: FloatArray | None, table: MixTable, speeds: FloatArray, dp: int) -> FloatArray | None:
    """Return the larger of `best` and the sums of these splits [K, N]."""
    states = int(np.prod([count + 1 for count in table.cells]))
    step = max(1, MOST_ENTRIES // states)
    for start in range(0, speeds.shape[1], step):
        sums = table.sums(speeds[:, start : start + step], dp).max(axis=-1)
        best = sums if best is None else np.maximum(best, sums)
    return best


def _speeds(splits: IntArray, mixes: IntArray, layer_s: FloatArray, most: FloatArray, fixed: float) -> FloatArray:
    """Return the speed of each mix with each split [K, N]; types are ordered from the slowest to the fastest."""
    kind = np.full(splits.shape, INNER)
    kind[:, 0], kind[:, -1] = FIRST, LAST
    place = np.argsort(splits, axis=1, kind="stable")
    layers, kind = np.take_along_axis(splits, place, axis=1), np.take_along_axis(kind, place, axis=1)
    holds = [layers <= most[:, t][kind] for t in range(len(layer_s))]
    speeds = np.empty((len(mixes), len(splits)))
    for row, mix in enumerate(mixes.tolist()):
        free = np.ones(splits.shape, dtype=bool)
        seconds, fits = np.zeros(len(splits)), np.ones(len(splits), dtype=bool)
        for t, count in enumerate(mix):
            if count:
                allowed = free & holds[t]
                taken = allowed & (np.cumsum(allowed, axis=1) <= count)
                fits &= taken.sum(axis=1) == count
                np.maximum(seconds, np.where(taken, layers, 0).max(axis=1) * layer_s[t], out=seconds)
                free &= ~taken
        speeds[row] = speeds_of(np.where(fits, seconds + fixed, np.inf))
    return speeds


def _splits(pp: int, num_layers: int, limit: NDArray[np.int_]) -> IntArray | None:
    """Return every (first, sorted inner ones, last) with the sum and the limits [N, pp]; None where too many."""
    rows: list[tuple[int, ...]] = []
    for first in range(1, int(limit[FIRST]) + 1):
        for last in range(1, min(int(limit[LAST]), num_layers - first) + 1):
            left = num_layers - first - last
            rows.extend((first, *inner, last) for inner in _partitions(left, pp - 2, int(limit[INNER])))
            if len(rows) > MOST_SPLITS:
                return None
    return np.array(rows, dtype=np.int64).reshape(-1, pp)


def _partitions(total: int, parts: int, most: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every non-decreasing tuple of `parts` numbers from `least` to `most` with this total."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    if parts == 1:
        if least <= total <= most:
            yield (total,)
        return
    for first in range(max(least, total - (parts - 1) * most), total // parts + 1):
        for rest in _partitions(total - first, parts - 1, most, first):
            yield (first, *rest)
