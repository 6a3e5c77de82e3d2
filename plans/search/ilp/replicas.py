"""The most that the replicas of a task can do together: exact over how machines mix in them.

A *cell* is one pipeline stage of one replica: `tp` GPUs. It is of type m when all its GPUs are of machine m, and of
the last type, *spread*, when they are of several machines. A replica's *mix* says how many of its pp cells are of each
type. Given the best speed (samples per second) of a replica of each mix, the best sum of speeds of dp replicas that
use so many cells of each machine follows by dynamic programming over replicas. Nothing is relaxed in that step: only
the speed of a mix is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Mixes of a replica, and states of the dynamic program, beyond which it is not done.
MOST_MIXES, MOST_STATES = 4_000, 20_000
#: Halvings of an interval of seconds per sample; its lower end is used.
HALVINGS = 44


class MixTable:
    """Mixes of replicas of `pp` cells on machines with so many GPUs, and sums of speeds over replicas."""

    def __init__(self, pp: int, tp: int, gpus: Sequence[int]) -> None:
        """List the mixes; `gpus` are the GPUs of each machine [M]."""
        self.pp, self.tp = pp, tp
        self.cells = tuple(count // tp for count in gpus)
        """Cells that each machine can hold on its own [M]."""
        self.can_spread = tp > 1 and len(gpus) > 1
        types = len(gpus) + (1 if self.can_spread else 0)
        every = _mixes(pp, types)
        self.pure = every[:, : len(gpus)]
        keep = (self.pure <= np.array(self.cells)).all(axis=1)
        self.mixes: IntArray = every[keep]
        """Cells by type [K, types]."""
        self.pure = self.pure[keep]

    @staticmethod
    def is_small(pp: int, tp: int, gpus: Sequence[int]) -> bool:
        """Tell whether the mixes and states are few enough."""
        types = len(gpus) + (1 if tp > 1 and len(gpus) > 1 else 0)
        states = math.prod(count // tp + 1 for count in gpus)
        return math.comb(pp + types - 1, pp) <= MOST_MIXES and states <= MOST_STATES

    def sums(self, speeds: FloatArray, dp: int) -> FloatArray:
        """Return the largest sum of speeds of `dp` replicas by cells used of each machine [*cells + 1, ...].

        Args:
            speeds: speed of a replica by mix [K, ...]; -inf where it can't be.
            dp: replicas.

        The cells used are exact; those of the spread type are the rest of dp * pp. Impossible states are -inf.
        """
        shape = tuple(count + 1 for count in self.cells)
        extra = speeds.shape[1:]
        total = np.full(shape + extra, -np.inf)
        total[(0,) * len(shape)] = 0.0
        useful = [k for k in range(len(speeds)) if np.isfinite(speeds[k]).any()]
        for _ in range(dp):
            following = np.full_like(total, -np.inf)
            for k in useful:
                shift = self.pure[k].tolist()
                if any(step >= size for step, size in zip(shift, shape, strict=True)):
                    continue
                to = tuple(slice(step, None) for step in shift)
                source = tuple(slice(0, size - step) for step, size in zip(shift, shape, strict=True))
                np.maximum(following[to], total[source] + speeds[k], out=following[to])
            total = following
        return total

    def restricted(self, kept: Sequence[int]) -> MixTable:
        """Return a table with some of the mixes only."""
        table = MixTable(self.pp, self.tp, [count * self.tp for count in self.cells])
        table.mixes, table.pure = self.mixes[list(kept)], self.pure[list(kept)]
        return table

    def trace(self, speeds: FloatArray, dp: int, cells: Sequence[int]) -> list[int]:
        """Return the mixes, one per replica, that make the entry of `sums` for these cells (it is finite)."""
        totals = [self.sums(speeds, count) for count in range(dp + 1)]
        left, chosen = tuple(cells), []
        for count in range(dp, 0, -1):
            ways = []
            for k, pure in enumerate(self.pure.tolist()):
                rest = tuple(a - b for a, b in zip(left, pure, strict=True))
                if min(rest) >= 0 and np.isfinite(speeds[k]):
                    ways.append((float(totals[count - 1][rest]) + float(speeds[k]), k, rest))
            _, k, left = max(ways)
            chosen.append(k)
        return chosen

    def at(self, sums: FloatArray, counts: Sequence[int]) -> FloatArray:
        """Return the entry of `sums` for exactly so many GPUs of each machine; the best one if cells may be spread."""
        if not self.can_spread:
            if any(count % self.tp for count in counts):
                return np.full(sums.shape[len(counts) :], -np.inf)
            entry: FloatArray = np.asarray(sums[tuple(count // self.tp for count in counts)])
            return entry
        # Spread cells take what is left: each machine gives them any number of its GPUs.
        box = tuple(slice(0, count // self.tp + 1) for count in counts)
        best: FloatArray = np.asarray(sums[box].max(axis=tuple(range(len(counts)))))
        return best


def _mixes(stages: int, types: int) -> IntArray:
    """Return every way to put so many stages on types [K, types]."""
    if types == 1:
        return np.array([[stages]])
    rows = [
        np.column_stack((np.full(len(rest), first), rest))
        for first in range(stages + 1)
        for rest in (_mixes(stages - first, types - 1),)
    ]
    return np.concatenate(rows)


@dataclass(frozen=True, slots=True)
class CellTimes:
    """What decides how many layers a cell does and holds, for G cases (decode batches) at a time, by type [T]."""

    layer_s: FloatArray
    """Seconds per sample and layer [G, A, T]; A alternatives that all hold at once."""
    head_s: FloatArray
    """Seconds per sample of the head on the last stage [G, A, T]."""
    transfer_s: FloatArray
    """Seconds per sample of the transfer to the next stage [G, T]."""
    most: FloatArray
    """Most layers that memory allows as inner, first, last, only stage [G, 4, T]."""

    def mix_s(self, mixes: IntArray, num_layers: int) -> FloatArray:
        """Return a lower bound on the seconds per sample of a replica of each mix [G, K]; infinite where none fits.

        The least t at which whole layers fit: inner cells hold floor((t - transfer) / layer) each, at most what their
        memory allows; the first and the last stage are on the types that suit them best.
        """
        used: NDArray[np.bool_] = np.greater(mixes, 0)
        if mixes.sum(axis=1).max() == 1:
            alone = (self.layer_s * num_layers + self.head_s).max(axis=1)
            alone = np.where(self.most[:, 3] >= num_layers, alone, np.inf)
            only: FloatArray = np.where(used, alone[:, None, :], 0.0).max(axis=2)
            return only
        is_open: NDArray[np.bool_] = np.asarray(np.isfinite(self.layer_s).all(axis=1))
        closed = (used & ~is_open[:, None, :]).any(axis=2)
        layer = np.where(is_open[:, None, :], self.layer_s, 1.0)
        ways = np.where(np.isfinite(self.transfer_s), self.transfer_s, 0.0).max(axis=1)
        top = (layer * num_layers + self.head_s).max(axis=(1, 2)) + ways
        low = np.zeros(closed.shape)
        high = np.broadcast_to(top[:, None] * (1.0 + 1e-9), closed.shape)
        fits = self._fits(mixes, layer, high, num_layers) & ~closed
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            now = self._fits(mixes, layer, middle, num_layers)
            high, low = np.where(now, middle, high), np.where(now, low, middle)
        result: FloatArray = np.where(fits, np.maximum(low, 1e-300), np.inf)
        return result

    def _fits(self, mixes: IntArray, layer: FloatArray, seconds: FloatArray, num_layers: int) -> NDArray[np.bool_]:
        room = np.maximum(0.0, seconds[:, :, None] - self.transfer_s[:, None, :])
        inner = np.floor(room[:, :, None, :] / layer[:, None] + 1e-9).min(axis=2)
        late = np.maximum(0.0, seconds[:, :, None, None] - self.head_s[:, None]) / layer[:, None]
        last = np.minimum(np.floor(late + 1e-9).min(axis=2), self.most[:, None, 2])
        first, inner = np.minimum(inner, self.most[:, None, 1]), np.minimum(inner, self.most[:, None, 0])
        used = mixes > 0
        gain = np.where(used, last - inner, -np.inf).max(axis=2) + np.where(used, first - inner, -np.inf).max(axis=2)
        result: NDArray[np.bool_] = (mixes * inner).sum(axis=2) + gain >= num_layers
        return result


def speeds_of(seconds: FloatArray) -> FloatArray:
    """Return 1 / seconds; -inf where it is infinite: such a replica can't be."""
    with np.errstate(divide="ignore"):
        speeds: FloatArray = np.where(np.isfinite(seconds), 1.0 / seconds, -np.inf)
    return speeds
