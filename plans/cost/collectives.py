"""Times of collectives and transfers between GPUs.

A link depends only on the two machines, so a ring over GPUs depends only on how many GPUs of each machine it has.
The best ring is the one whose slowest edge is fastest (a bottleneck travelling salesman); with this structure it is
found by a search over machine visits: exact for small sets, and for larger ones within a bounded search whose
answer is never better than the truth (`RingSolution.is_proved` tells).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: States that one feasibility search may visit before it gives up at a threshold. Rings of up to eight machines
#: need fewer; beyond that the limit bounds the time per ring to some milliseconds.
SEARCH_LIMIT = 5_000
#: Needed machine visits above which no search is tried (its depth is that of the recursion).
MAX_VISITS = 400


@dataclass(frozen=True, slots=True)
class RingSolution:
    """A ring's slowest edge."""

    bottleneck_s: float
    """Seconds over the slowest edge; infinite where no ring exists; 0 for a single GPU."""
    is_proved: bool
    """Whether no ring with a faster slowest edge exists."""


def best_ring(counts: Sequence[int], cost: NDArray[np.float64]) -> RingSolution:
    """Return the ring over GPUs whose slowest edge is fastest.

    Args:
        counts: GPUs per machine [k], each >= 1.
        cost: seconds over an edge between two GPUs, by machine [k, k]; the diagonal is the link inside a machine.

    Returns:
        The bottleneck in seconds. O(k^2 log k) in the common cases; bounded search otherwise.
    """
    total, num_machines = sum(counts), len(counts)
    if total == 1:
        return RingSolution(0.0, is_proved=True)
    if num_machines == 1:
        return RingSolution(float(cost[0, 0]), is_proved=True)
    if total == 2:
        return RingSolution(float(cost[0, 1]), is_proved=True)
    thresholds = sorted({float(cost[i, j]) for i in range(num_machines) for j in range(i + 1)
                         if i != j or counts[i] > 1})  # fmt: skip
    finite = [t for t in thresholds if np.isfinite(t)]
    bound = _lower_bound(counts, cost)
    candidates = [t for t in finite if t >= bound]
    return _bisect(counts, cost, candidates)


def _bisect(counts: Sequence[int], cost: NDArray[np.float64], candidates: list[float]) -> RingSolution:
    """Find the least threshold at which a ring exists; existence is monotone in the threshold."""
    if not candidates:
        return RingSolution(float("inf"), is_proved=True)
    low, high, proved = 0, len(candidates) - 1, True
    found, complete = _ring_exists(counts, cost, candidates[high])
    if not found:
        return RingSolution(float("inf"), is_proved=complete)
    while low < high:
        middle = (low + high) // 2
        found, complete = _ring_exists(counts, cost, candidates[middle])
        if found:
            high = middle
        else:
            low = middle + 1
            proved = proved and complete
    return RingSolution(candidates[low], is_proved=proved)


def _lower_bound(counts: Sequence[int], cost: NDArray[np.float64]) -> float:
    """Return the largest second-fastest edge of any GPU: each GPU of a ring uses two edges."""
    bound = 0.0
    for i in range(len(counts)):
        edges: list[float] = []
        for j, count in enumerate(counts):
            edges += [float(cost[i, j])] * min(2, count - 1 if i == j else count)
        bound = max(bound, sorted(edges)[1])
    return bound


def _ring_exists(counts: Sequence[int], cost: NDArray[np.float64], threshold: float) -> tuple[bool, bool]:
    """Tell whether a ring with all edges <= threshold exists, and whether the answer is certain.

    A machine whose inner link is within the threshold may be visited once with all its GPUs, or up to `count` times
    (more than k visits never help); one whose inner link is too slow is left and entered again for each GPU.
    """
    num_machines = len(counts)
    allowed = cost <= threshold
    neighbours = [[j for j in range(num_machines) if j != i and allowed[i, j]] for i in range(num_machines)]
    inner = [counts[i] == 1 or bool(allowed[i, i]) for i in range(num_machines)]
    need = [1 if inner[i] else counts[i] for i in range(num_machines)]
    spare = [min(counts[i], num_machines) - 1 if inner[i] else 0 for i in range(num_machines)]
    if any(not near for near in neighbours) or not _connected(neighbours):
        return False, True
    if all(inner) and all(len(near) == num_machines - 1 for near in neighbours):
        return True, True
    return _RingSearch(neighbours, need, spare).run()


def _connected(neighbours: Sequence[Sequence[int]]) -> bool:
    seen, frontier = {0}, [0]
    while frontier:
        for j in neighbours[frontier.pop()]:
            if j not in seen:
                seen.add(j)
                frontier.append(j)
    return len(seen) == len(neighbours)


class _RingSearch:
    """Depth-first search for a closed walk that visits machine i between need[i] and need[i] + spare[i] times."""

    def __init__(self, neighbours: list[list[int]], need: list[int], spare: list[int]) -> None:
        self.neighbours, self.need, self.spare = neighbours, need, spare
        self.open = sum(need)
        self.visited = 0
        self.failed: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
        # Start where there is least choice: its two neighbours on the ring are nearly forced.
        self.start = min(range(len(need)), key=lambda i: (len(neighbours[i]), i))

    def run(self) -> tuple[bool, bool]:
        """Return (found, certain)."""
        if self.open > MAX_VISITS:
            return False, False
        self._take(self.start)
        found = self._extend(self.start)
        return found, found or self.visited <= SEARCH_LIMIT

    def _take(self, machine: int) -> bool:
        """Use a visit; tell whether it was a needed one."""
        if self.need[machine]:
            self.need[machine] -= 1
            self.open -= 1
            return True
        self.spare[machine] -= 1
        return False

    def _put_back(self, machine: int, *, needed: bool) -> None:
        if needed:
            self.need[machine] += 1
            self.open += 1
        else:
            self.spare[machine] += 1

    def _extend(self, machine: int) -> bool:
        self.visited += 1
        if self.visited > SEARCH_LIMIT:
            return False
        if not self.open and self.start in self.neighbours[machine]:
            return True
        state = (machine, tuple(self.need), tuple(self.spare))
        if state in self.failed:
            return False
        for following in self._choices(machine):
            needed = self._take(following)
            if self._extend(following):
                return True
            self._put_back(following, needed=needed)
        self.failed.add(state)
        return False

    def _choices(self, machine: int) -> list[int]:
        """Next machines: needed ones with the fewest onward links first, then repeated visits."""
        near = self.neighbours[machine]
        needed = [j for j in near if self.need[j]]
        repeated = [j for j in near if not self.need[j] and self.spare[j]]
        needed.sort(key=lambda j: sum(1 for i in self.neighbours[j] if self.need[i]))
        return needed + repeated


class LinkTimes:
    """Times over the links of a cluster, with what was computed once kept.

    Args:
        latency_s: one-way latency by machine [M, M], the diagonal inside a machine; infinite where forbidden.
        s_per_byte: seconds per byte by machine [M, M].
        latency_per_step: charge latency at each of the 2(n - 1) steps of a ring (calibrated) instead of once (paper).
    """

    def __init__(
        self, latency_s: NDArray[np.float64], s_per_byte: NDArray[np.float64], *, latency_per_step: bool
    ) -> None:
        self.latency_s = latency_s
        self.s_per_byte = s_per_byte
        self.latency_per_step = latency_per_step
        # Nested lists: reading one element of them is several times faster than of an array.
        self._latency: list[list[float]] = latency_s.tolist()
        self._inverse: list[list[float]] = s_per_byte.tolist()
        self._rings: dict[tuple[tuple[int, ...], float], float] = {}
        self._pairs: dict[tuple[frozenset[int], frozenset[int], float], float] = {}

    def ring_s(self, machines: tuple[int, ...], num_bytes: float) -> float:
        """Return the slowest edge of the best ring over GPUs on these machines (sorted, one entry per GPU).

        The time of an edge is alpha + bytes / beta, with alpha once or 2(n - 1) times.
        """
        key = (machines, num_bytes)
        value = self._rings.get(key)
        if value is None:
            value = self._rings[key] = self._solve(machines, num_bytes)
        return value

    def _solve(self, machines: tuple[int, ...], num_bytes: float) -> float:
        if len(machines) == 1:
            return 0.0
        steps = 2 * (len(machines) - 1) if self.latency_per_step else 1
        counts = Counter(machines)
        places = list(counts)
        cost = self.edge_matrix(places, num_bytes, steps)
        return best_ring(list(counts.values()), cost).bottleneck_s

    def edge_matrix(self, machines: Sequence[int], num_bytes: float, steps: int = 1) -> NDArray[np.float64]:
        """Return seconds over the edges between machines [k, k]."""
        index = np.ix_(machines, machines)
        result: NDArray[np.float64] = steps * self.latency_s[index] + num_bytes * self.s_per_byte[index]
        return result

    def pair_s(self, first: frozenset[int], second: frozenset[int], num_bytes: float) -> float:
        """Return the fastest transfer between a GPU on one set of machines and another GPU on the other set."""
        key = (first, second, num_bytes)
        value = self._pairs.get(key)
        if value is None:
            value = min(self._latency[a][b] + num_bytes * self._inverse[a][b] for a in first for b in second)
            self._pairs[key] = value
        return value

    def edge_s(self, machine_a: int, machine_b: int, num_bytes: float) -> float:
        """Return seconds to move bytes between two GPUs on these machines."""
        return self._latency[machine_a][machine_b] + num_bytes * self._inverse[machine_a][machine_b]

    def trim(self, limit: int) -> None:
        """Forget what was computed when more than `limit` entries are kept."""
        if len(self._rings) + len(self._pairs) > limit:
            self._rings.clear()
            self._pairs.clear()
