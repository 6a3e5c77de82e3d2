"""Phase 2: which GPUs train and which generate (AReaL-Hex, graph repartition).

Training gets links, generation gets memory bandwidth: (link bandwidth inside D_T) + (share of HBM bandwidth in D_I) is
maximised while training's share of compute lies in a band. Splits count GPUs per class of equal machines, so the few
that exist are tabulated once and every step of the bisection is a look-up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans.search.areal_hex.machine_classes import MachineClass
from plans.spec.cluster import ClusterView, FloatArray

IntArray = NDArray[np.int64]

#: Splits tabulated at most; coarser steps are used on larger clusters.
MOST_SPLITS = 20_000


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of each machine that train; the others generate."""

    training: tuple[int, ...]
    """Number of training GPUs by machine [M]."""

    def training_gpus(self, view: ClusterView) -> tuple[int, ...]:
        """Return the indices of D_T: the first GPUs of each machine."""
        return _indices(view, self.training, first=True)

    def rollout_gpus(self, view: ClusterView) -> tuple[int, ...]:
        """Return the indices of D_I."""
        return _indices(view, self.training, first=False)


class SplitTable:
    """All splits in steps, with training's share of compute and the objective of each."""

    def __init__(self, view: ClusterView, classes: Sequence[MachineClass], *, mean_bandwidth: bool) -> None:
        """Tabulate.

        Args:
            view: the cluster.
            classes: its classes of equal machines.
            mean_bandwidth: repair 7; otherwise links count as the sum over pairs.
        """
        self.view, self.classes = view, tuple(classes)
        self._mean_bandwidth = mean_bandwidth
        self._sizes = np.bincount(view.machine_of, minlength=len(view.machine_names)).astype(np.float64)
        starts = np.concatenate(([0], np.cumsum(self._sizes)))[:-1].astype(int)
        self._compute, self._hbm = view.compute_flop_per_s[starts], view.hbm_bytes_per_s[starts]
        self._links = view.machine_bytes_per_s.copy()
        lone = np.flatnonzero(self._sizes == 1)
        self._links[lone, lone] = 0.0
        self.steps, counts = self._enumerate()
        self.counts: IntArray = counts
        """Training GPUs by split and machine [S, M]."""
        self.shares = counts @ self._compute / float(self._sizes @ self._compute)
        """Training's share of compute by split [S]."""
        self.objectives = self.objective(counts)
        """Objective of phase 2 by split [S]."""

    @property
    def step_share(self) -> float:
        """Share of compute of the largest step: what a band must be able to hold."""
        total = float(self._sizes @ self._compute)
        return max(
            step * float(self._compute[c.machines[0]]) / total for step, c in zip(self.steps, self.classes, strict=True)
        )

    @property
    def least_step_share(self) -> float:
        """Share of compute of the smallest step: the resolution of the bisection."""
        total = float(self._sizes @ self._compute)
        return min(
            step * float(self._compute[c.machines[0]]) / total for step, c in zip(self.steps, self.classes, strict=True)
        )

    def objective(self, counts: IntArray) -> FloatArray:
        """Return (links inside D_T) + (HBM share of D_I) of splits [S, M]; a plan's quality does not enter."""
        inside = self._pair_sums(counts.astype(np.float64))
        if self._mean_bandwidth:
            members = counts.sum(axis=1).astype(np.float64)
            pairs = members * (members - 1.0) / 2.0
            # A single GPU needs no link, so it loses nothing.
            mean = np.divide(inside, pairs, out=np.full_like(inside, self._best_link), where=pairs > 0)
            links = mean / self._best_link
        else:
            links = inside / max(float(self._pair_sums(self._sizes[None, :])[0]), 1e-300)
        generating = (self._sizes[None, :] - counts) @ self._hbm
        result: FloatArray = links + generating / float(self._sizes @ self._hbm)
        return result

    def in_band(self, low: float, high: float, most: int) -> list[Split]:
        """Return up to `most` splits whose share lies in [low, high], best objective first, then the first."""
        rows = np.flatnonzero((self.shares >= low - 1e-12) & (self.shares <= high + 1e-12))
        # Rounded, so that equal splits of relabelled GPUs do not differ in the last bit.
        keys = np.round(-self.objectives[rows], 12)
        return [self._split(row) for row in rows[np.argsort(keys, kind="stable")][:most].tolist()]

    @property
    def step_sizes(self) -> list[tuple[int, ...]]:
        """Steps of the swap search by class, coarse to fine: the table's, halved down to single GPUs."""
        sizes = [self.steps]
        while max(sizes[-1]) > 1:
            sizes.append(tuple(max(1, step // 2) for step in sizes[-1]))
        return sizes

    def neighbours(self, split: Split, steps: Sequence[int]) -> list[Split]:
        """Return the splits one step away: a step of a class changes sides, or two classes exchange one.

        Args:
            split: the split.
            steps: GPUs that move, by class.
        """
        now = [sum(split.training[m] for m in c.machines) for c in self.classes]
        shifts = [(i, sign * step) for i, step in enumerate(steps) for sign in (1, -1)]
        found = [dict([shift]) for shift in shifts]
        found += [dict([a, b]) for a in shifts for b in shifts if a[0] < b[0] and (a[1] > 0) != (b[1] > 0)]
        splits = []
        for shift in found:
            moved = [min(max(n + shift.get(i, 0), 0), self.classes[i].num_gpus) for i, n in enumerate(now)]
            if moved != now and 0 < sum(moved) < self.view.num_gpus:
                splits.append(self._split_of(moved))
        return list(dict.fromkeys(splits))

    def share_of(self, split: Split) -> float:
        """Return training's realised share of compute."""
        return float(np.array(split.training) @ self._compute / (self._sizes @ self._compute))

    @property
    def _best_link(self) -> float:
        return max(float(self._links.max()), 1e-300)

    def _pair_sums(self, counts: FloatArray) -> FloatArray:
        """Return the sum of link bandwidth over the pairs of GPUs in each row [S]."""
        diagonal = np.diagonal(self._links)
        everything = np.einsum("sm,mn,sn->s", counts, self._links, counts)
        result: FloatArray = (everything - counts @ diagonal) / 2.0
        return result

    def _enumerate(self) -> tuple[tuple[int, ...], IntArray]:
        for divisor in (4, 2, 1):
            steps = tuple(max(1, c.size // divisor) for c in self.classes)
            levels = [_levels(c.num_gpus, step) for c, step in zip(self.classes, steps, strict=True)]
            if np.prod([float(len(level)) for level in levels]) <= MOST_SPLITS:
                rows = [self._split_of(row).training for row in itertools.product(*levels)]
                return steps, np.array(rows, dtype=np.int64)
        return tuple(c.size for c in self.classes), self._paths()

    def _paths(self) -> IntArray:
        """Return splits along few orders of the machines (clusters with too many classes for a table).

        Machines turn from training to generation one at a time: by memory bandwidth per compute, or region by region
        (the most generating region first), so that both a cut by type and a cut by place are there for every share.
        """
        ratio = self._hbm / self._compute
        region = self.view.region_of_machine
        region_ratio = np.array(
            [
                (self._hbm * self._sizes)[region == r].sum() / (self._compute * self._sizes)[region == r].sum()
                for r in range(len(self.view.region_names))
            ]
        )
        machines = range(len(self._sizes))
        orders = [
            sorted(machines, key=lambda m: (-ratio[m], -region_ratio[region[m]], m)),
            sorted(machines, key=lambda m: (-region_ratio[region[m]], region[m], -ratio[m], m)),
            sorted(machines, key=lambda m: (region_ratio[region[m]], region[m], -ratio[m], m)),
        ]
        rows = []
        for order in orders:
            counts = self._sizes.astype(np.int64)
            rows.append(counts.copy())
            for machine in order:
                counts[machine] = 0
                rows.append(counts.copy())
        return np.array(rows, dtype=np.int64)

    def _split(self, row: int) -> Split:
        return Split(tuple(self.counts[row].tolist()))

    def _split_of(self, per_class: Sequence[int]) -> Split:
        """Return the split with so many training GPUs per class: whole machines first."""
        training = [0] * len(self._sizes)
        for count, members in zip(per_class, self.classes, strict=True):
            left = count
            for machine in members.machines:
                training[machine] = min(members.size, left)
                left -= training[machine]
        return Split(tuple(training))


def _levels(total: int, step: int) -> list[int]:
    levels = list(range(0, total, step))
    return [*levels, total]


def _indices(view: ClusterView, training: Sequence[int], *, first: bool) -> tuple[int, ...]:
    gpus: list[int] = []
    start = 0
    sizes = np.bincount(view.machine_of, minlength=len(training)).tolist()
    for count, size in zip(training, sizes, strict=True):
        gpus += range(start, start + count) if first else range(start + count, start + size)
        start += size
    return tuple(gpus)
