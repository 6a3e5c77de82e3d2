"""The locality swap search on a candidate: GPUs change groups where the score gains, tasklets follow their places."""

from __future__ import annotations

from plans.cost.cache import BoundedCache
from plans.search.genome import Genome
from plans.search.locality import LocalitySearch, Swap, group_counts, machine_affinity
from plans.spec.cluster import ClusterView

#: Groupings of which the swaps are kept.
KEPT = 5_000


class SwapSearch:
    """The search on one cluster. Most candidates have the machines of an earlier one, so swaps are kept by machine."""

    def __init__(self, view: ClusterView) -> None:
        """Keep the view."""
        self._view = view
        self._affinity = machine_affinity(view)
        self._machine_of: list[int] = view.machine_of.tolist()
        self._kept: BoundedCache[tuple[int, ...], list[Swap]] = BoundedCache(KEPT)

    def improve(self, genome: Genome) -> Genome:
        """Return the candidate after greedy cross-group swaps; the same object when no swap gains."""
        if len(genome.grouping) < 2:
            return genome
        swaps = self._swaps(genome.gpus)
        if not swaps:
            return genome
        cells: dict[tuple[int, int], list[int]] = {}
        for group, gpus in enumerate(genome.gpus):
            for gpu in gpus:
                cells.setdefault((self._machine_of[gpu], group), []).append(gpu)
        origin: dict[int, int] = {}
        for swap in swaps:
            a = cells[swap.machine_a, swap.group_a].pop()
            b = cells[swap.machine_b, swap.group_b].pop()
            cells.setdefault((swap.machine_b, swap.group_a), []).append(b)
            cells.setdefault((swap.machine_a, swap.group_b), []).append(a)
            # The place that held a is now held by b, whichever GPU was there first.
            origin[b], origin[a] = origin.get(a, a), origin.get(b, b)
        return genome.exchanged({first: now for now, first in origin.items() if first != now})

    def _swaps(self, groups: tuple[tuple[int, ...], ...]) -> list[Swap]:
        """Return the swaps of a grouping; they depend on its GPUs by machine and group only."""
        width = len(groups)
        counts = [0] * (width * len(self._affinity))
        for group, gpus in enumerate(groups):
            for gpu in gpus:
                counts[self._machine_of[gpu] * width + group] += 1
        key = tuple(counts)
        found = self._kept.get(key)
        if found is None:
            found = LocalitySearch(self._affinity, group_counts(self._view, groups)).run()
            self._kept.put(key, found)
        return found
