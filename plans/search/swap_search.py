"""The locality swap search on a candidate: GPUs change groups where the score gains, tasklets follow their places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plans.search.genome import Genome
from plans.search.locality import LocalitySearch, group_counts
from plans.spec.cluster import ClusterView


def improve_locality(view: ClusterView, affinity: NDArray[np.float64], genome: Genome) -> Genome:
    """Return the candidate after greedy cross-group swaps; the same object when no swap gains."""
    if len(genome.grouping) < 2:
        return genome
    swaps = LocalitySearch(affinity, group_counts(view, genome.gpus)).run()
    if not swaps:
        return genome
    machine_of = view.machine_of.tolist()
    cells: dict[tuple[int, int], list[int]] = {}
    for group, gpus in enumerate(genome.gpus):
        for gpu in gpus:
            cells.setdefault((machine_of[gpu], group), []).append(gpu)
    origin: dict[int, int] = {}
    for swap in swaps:
        a = cells[swap.machine_a, swap.group_a].pop()
        b = cells[swap.machine_b, swap.group_b].pop()
        cells.setdefault((swap.machine_b, swap.group_a), []).append(b)
        cells.setdefault((swap.machine_a, swap.group_b), []).append(a)
        # The place that held a is now held by b, whichever GPU was there first.
        origin[b], origin[a] = origin.get(a, a), origin.get(b, b)
    return genome.exchanged({first: now for now, first in origin.items() if first != now})
