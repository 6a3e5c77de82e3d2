"""Locality score of a GPU grouping and the swap search that raises it (HetRL section 4.3; weights reconstructed).

score = sum over groups, over pairs of GPUs in the group, of w, with w = 3 on one machine, 2 in one zone, 1 in one
region and 0 otherwise. All GPUs of a machine in a group are alike for the score, so the search works on cells
(machine, group) instead of GPUs: a pass costs O(cells^2), whatever the number of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans.spec.cluster import ClusterView

SAME_MACHINE, SAME_ZONE, SAME_REGION = 3.0, 2.0, 1.0
#: Swaps that one search may apply; a grouping of N GPUs needs far fewer in practice.
MAX_SWAPS = 512


def machine_affinity(view: ClusterView) -> NDArray[np.float64]:
    """Return w by machine [M, M]."""
    zone, region = view.zone_of_machine, view.region_of_machine
    affinity = np.where(region[:, None] == region[None, :], SAME_REGION, 0.0)
    affinity = np.where(zone[:, None] == zone[None, :], SAME_ZONE, affinity)
    np.fill_diagonal(affinity, SAME_MACHINE)
    return affinity


def locality_score(affinity: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Return the score of a grouping from the numbers of GPUs by machine and group [M, G]."""
    pairs = np.einsum("mg,mn,ng->", counts, affinity, counts)
    # Each unordered pair was counted twice, and each GPU once with itself.
    return float(pairs - counts.sum() * SAME_MACHINE) / 2.0


@dataclass(frozen=True, slots=True)
class Swap:
    """An exchange of one GPU of a cell with one of another cell."""

    machine_a: int
    group_a: int
    machine_b: int
    group_b: int
    gain: float


class LocalitySearch:
    """Greedy best-gain swaps between groups, with sums that follow each swap incrementally."""

    def __init__(self, affinity: NDArray[np.float64], counts: NDArray[np.float64]) -> None:
        """Start from the numbers of GPUs by machine and group [M, G]; both arrays are left alone."""
        self.affinity = affinity
        self.counts = counts.copy()
        self.sums: NDArray[np.float64] = affinity @ self.counts

    def best_swap(self) -> Swap | None:
        """Return the swap with the largest positive gain; the first in cell order among equals."""
        machines, groups = np.nonzero(self.counts)
        # reach[x, y]: affinity of a GPU of cell x to group y's GPUs.
        reach = self.sums[machines][:, groups]
        own = self.sums[machines, groups] - SAME_MACHINE
        pair = self.affinity[np.ix_(machines, machines)]
        gain = reach + reach.T - own[:, None] - own[None, :] - 2.0 * pair
        gain[groups[:, None] == groups[None, :]] = -np.inf
        x, y = divmod(int(np.argmax(gain)), len(machines))
        if not gain[x, y] > 1e-9:
            return None
        return Swap(int(machines[x]), int(groups[x]), int(machines[y]), int(groups[y]), float(gain[x, y]))

    def apply(self, swap: Swap) -> None:
        """Exchange the two GPUs and update the sums: O(M)."""
        a, b = swap.machine_a, swap.machine_b
        self.counts[a, swap.group_a] -= 1
        self.counts[b, swap.group_b] -= 1
        self.counts[b, swap.group_a] += 1
        self.counts[a, swap.group_b] += 1
        difference = self.affinity[:, b] - self.affinity[:, a]
        self.sums[:, swap.group_a] += difference
        self.sums[:, swap.group_b] -= difference

    def run(self, max_swaps: int = MAX_SWAPS) -> list[Swap]:
        """Apply best swaps until none improves the score; return them in order."""
        applied: list[Swap] = []
        while len(applied) < max_swaps:
            swap = self.best_swap()
            if swap is None:
                break
            self.apply(swap)
            applied.append(swap)
        return applied


def group_counts(view: ClusterView, groups: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the numbers of GPUs by machine and group [M, G]."""
    counts = np.zeros((len(view.machine_names), len(groups)))
    for index, gpus in enumerate(groups):
        np.add.at(counts[:, index], view.machine_of[list(gpus)], 1.0)
    return counts
