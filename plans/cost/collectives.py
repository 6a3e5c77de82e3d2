"""Times of collectives and transfers between GPUs.

A link depends only on the two machines, so a ring over GPUs depends only on how many GPUs of each machine it has.
The best ring is the one whose slowest edge is fastest (a bottleneck travelling salesman); with this structure it is
found by a search over machine visits: exact for small sets, and for larger ones within a bounded search whose
answer is never better than the truth (`RingSolution.is_proved` tells).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.cost.cache import BoundedCache
from plans.spec.cluster import FloatArray, IntArray

#: States that one feasibility search may visit before it gives up at a threshold. Rings of up to eight machines
#: need fewer; beyond that the limit bounds the time per ring to some milliseconds.
SEARCH_LIMIT = 5_000
#: Needed machine visits above which no search is tried (its depth is that of the recursion).
MAX_VISITS = 400
#: Machines up to which a ring is first looked for without a search.
PLAIN_MACHINES = 8
#: Ring and pair times that `LinkTimes` keeps.
RINGS_KEPT = 20_000


@dataclass(frozen=True, slots=True)
class RingSolution:
    """A ring's slowest edge."""

    bottleneck_s: float
    """Seconds over the slowest edge; infinite where no ring exists; 0 for a single GPU."""
    is_proved: bool
    """Whether no ring with a faster slowest edge exists."""


def best_ring(counts: Sequence[int], cost: FloatArray) -> RingSolution:
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
    if num_machines == 2 and min(counts) == 1:
        # The single GPU is joined to both ends of the run over the other machine.
        larger = 0 if counts[0] > 1 else 1
        return RingSolution(max(float(cost[0, 1]), float(cost[larger, larger])), is_proved=True)
    if num_machines <= PLAIN_MACHINES:
        plain_s = _plain_ring(counts, cost.tolist())
        if plain_s is not None:
            return RingSolution(plain_s, is_proved=True)
    gpus = np.asarray(counts)
    edges = cost.copy()
    # A machine with one GPU has no inner edge.
    edges[np.diag_indices(num_machines)] = np.where(gpus > 1, cost.diagonal(), np.inf)
    bound = _lower_bound(gpus, edges)
    found, complete = _ring_exists(gpus, edges, bound) if np.isfinite(bound) else (False, True)
    if found:
        return RingSolution(bound, is_proved=True)
    values = np.unique(edges)
    return _bisect(gpus, edges, values[(values > bound) & np.isfinite(values)].tolist(), proved=complete)


def _plain_ring(counts: Sequence[int], cost: list[list[float]]) -> float | None:
    """Return the slowest edge of the ring through the machines in their order, or None where it may not be the best.

    It is the best where no ring can do without so slow an edge: every GPU has two edges, and the edges of a ring join
    all machines.
    """
    machines = range(len(counts))
    slowest = max([cost[i - 1][i] for i in machines])
    slowest = max([slowest, *[cost[i][i] for i in machines if counts[i] > 1]])
    for i in machines:
        two = [cost[i][i]] * min(2, counts[i] - 1)
        for j in machines:
            if j != i:
                two += [cost[i][j]] * min(2, counts[j])
        if sorted(two)[1] >= slowest:
            return slowest
    joined = _slowest_of_tree(cost)
    return slowest if joined >= slowest else None


def _slowest_of_tree(cost: list[list[float]]) -> float:
    """Return the slowest edge of a spanning tree whose slowest edge is fastest (Prim)."""
    reach, slowest = cost[0][:], 0.0
    left = list(range(1, len(cost)))
    while left:
        nearest = min(left, key=reach.__getitem__)
        slowest = max(slowest, reach[nearest])
        left.remove(nearest)
        for machine in left:
            reach[machine] = min(reach[machine], cost[nearest][machine])
    return slowest


def _bisect(gpus: IntArray, edges: FloatArray, candidates: list[float], *, proved: bool) -> RingSolution:
    """Find the least threshold at which a ring exists; existence is monotone in the threshold."""
    if not candidates:
        return RingSolution(float("inf"), is_proved=proved)
    low, high = 0, len(candidates) - 1
    found, complete = _ring_exists(gpus, edges, candidates[high])
    if not found:
        return RingSolution(float("inf"), is_proved=complete)
    while low < high:
        middle = (low + high) // 2
        found, complete = _ring_exists(gpus, edges, candidates[middle])
        if found:
            high = middle
        else:
            low = middle + 1
            proved = proved and complete
    return RingSolution(candidates[low], is_proved=proved)


def _lower_bound(gpus: IntArray, edges: FloatArray) -> float:
    """Return the largest second-fastest edge of any GPU: each GPU of a ring uses two edges."""
    others = gpus[None, :] - np.eye(len(gpus), dtype=np.int64)
    twice = np.concatenate([np.where(others >= 1, edges, np.inf), np.where(others >= 2, edges, np.inf)], axis=1)
    return float(np.partition(twice, 1, axis=1)[:, 1].max())


def _ring_exists(gpus: IntArray, edges: FloatArray, threshold: float) -> tuple[bool, bool]:
    """Tell whether a ring with all edges <= threshold exists, and whether the answer is certain.

    A machine whose inner link is within the threshold may be visited once with all its GPUs, or up to `count` times;
    one whose inner link is too slow is left and entered again for each GPU. Machines of the first kind that reach
    the same machines and each other act as one machine with all their GPUs.
    """
    near = (edges <= threshold) | np.eye(len(gpus), dtype=bool)
    inner = (gpus == 1) | (edges.diagonal() <= threshold)
    if inner.all() and near.all():
        return True, True
    merged: dict[bytes | int, list[int]] = {}
    for i in range(len(gpus)):
        merged.setdefault(near[i].tobytes() if inner[i] else i, []).append(i)
    nodes = list(merged.values())
    heads = [members[0] for members in nodes]
    held = [int(gpus[members].sum()) for members in nodes]
    neighbours = [[j for j, b in enumerate(heads) if b != a and near[a, b]] for a in heads]
    if len(nodes) == 1:
        return bool(inner[heads[0]]), True
    if any(not reach for reach in neighbours) or not _connected(neighbours):
        return False, True
    need = [1 if inner[head] else count for head, count in zip(heads, held, strict=True)]
    # Between two visits of a machine lies a needed visit of another one, else the loop between them could be cut out:
    # more visits than needed ones never help.
    most = sum(need)
    spare = [min(count, most) - 1 if inner[head] else 0 for head, count in zip(heads, held, strict=True)]
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

    def __init__(self, latency_s: FloatArray, s_per_byte: FloatArray, *, latency_per_step: bool) -> None:
        self.latency_s = latency_s
        self.s_per_byte = s_per_byte
        self.latency_per_step = latency_per_step
        self.rings_proved = True
        """Whether every ring solved so far is proved to be the best one."""
        # Nested lists: reading one element of them is several times faster than of an array.
        self._latency: list[list[float]] = latency_s.tolist()
        self._inverse: list[list[float]] = s_per_byte.tolist()
        # Links by class (latency, seconds per byte): the best ring depends on the order of the classes' times only.
        classes = np.unique(np.stack([latency_s.ravel(), s_per_byte.ravel()], axis=1), axis=0)
        self._classes: tuple[FloatArray, FloatArray] = (classes[:, 0].copy(), classes[:, 1].copy())
        self._order_ids: dict[bytes, int] = {}
        self._orders: BoundedCache[tuple[float, int], int] = BoundedCache(RINGS_KEPT)
        self._rings: BoundedCache[tuple[tuple[int, ...], int], tuple[float, float]] = BoundedCache(RINGS_KEPT)
        self._pairs: BoundedCache[tuple[frozenset[int], frozenset[int], float], float] = BoundedCache(RINGS_KEPT)

    def ring_s(self, machines: tuple[int, ...], num_bytes: float) -> float:
        """Return the slowest edge of the best ring over GPUs on these machines (sorted, one entry per GPU).

        The time of an edge is alpha + bytes / beta, with alpha once or 2(n - 1) times.
        """
        if len(machines) == 1:
            return 0.0
        latency_s, s_per_byte = self.slowest_edge(machines, num_bytes)
        return self._steps(len(machines)) * latency_s + num_bytes * s_per_byte

    def slowest_edge(self, machines: tuple[int, ...], num_bytes: float) -> tuple[float, float]:
        """Return latency and seconds per byte of the slowest edge of the best ring over two GPUs or more.

        Infinite latency where there is no ring; machines as in `ring_s`.
        """
        steps = self._steps(len(machines))
        key = (machines, self._order(num_bytes, steps))
        slowest = self._rings.get(key)
        if slowest is None:
            slowest = self._solve(machines, num_bytes, steps)
            self._rings.put(key, slowest)
        return slowest

    def _steps(self, size: int) -> int:
        """Return how often a ring of so many GPUs pays the latency of an edge."""
        return 2 * (size - 1) if self.latency_per_step else 1

    def ring_edge_s(self, machine_a: int, machine_b: int, size: int, num_bytes: float) -> float:
        """Return seconds of an edge of a ring of `size` GPUs that carries so many bytes in all."""
        return self._steps(size) * self._latency[machine_a][machine_b] + num_bytes * self._inverse[machine_a][machine_b]

    def is_forbidden(self, machine_a: int, machine_b: int) -> bool:
        """Tell whether nothing can be sent between two machines."""
        return math.isinf(self._latency[machine_a][machine_b])

    def _order(self, num_bytes: float, steps: int) -> int:
        """Return a number for the order, with ties, of the link classes' times for a message."""
        found = self._orders.get((num_bytes, steps))
        if found is None:
            latency_s, s_per_byte = self._classes
            _, rank = np.unique(steps * latency_s + num_bytes * s_per_byte, return_inverse=True)
            found = self._order_ids.setdefault(rank.tobytes(), len(self._order_ids))
            self._orders.put((num_bytes, steps), found)
        return found

    def _solve(self, machines: tuple[int, ...], num_bytes: float, steps: int) -> tuple[float, float]:
        """Return latency and seconds per byte of the slowest edge of the best ring."""
        counts = Counter(machines)
        places = list(counts)
        cost = self.edge_matrix(places, num_bytes, steps)
        solution = best_ring(list(counts.values()), cost)
        self.rings_proved = self.rings_proved and solution.is_proved
        slowest_s = solution.bottleneck_s
        if not np.isfinite(slowest_s):
            return math.inf, 0.0
        a, b = divmod(int(np.argmax(cost == slowest_s)), len(places))
        return self._latency[places[a]][places[b]], self._inverse[places[a]][places[b]]

    def edge_matrix(self, machines: Sequence[int], num_bytes: float, steps: int = 1) -> FloatArray:
        """Return seconds over the edges between machines [k, k]."""
        latency = self.latency_s.take(machines, axis=0).take(machines, axis=1)
        inverse = self.s_per_byte.take(machines, axis=0).take(machines, axis=1)
        result: FloatArray = steps * latency + num_bytes * inverse
        return result

    def pair_s(self, first: frozenset[int], second: frozenset[int], num_bytes: float) -> float:
        """Return the fastest transfer between a GPU on one set of machines and another GPU on the other set."""
        key = (first, second, num_bytes)
        value = self._pairs.get(key)
        if value is None:
            value = min(self._latency[a][b] + num_bytes * self._inverse[a][b] for a in first for b in second)
            self._pairs.put(key, value)
        return value

    def edge_s(self, machine_a: int, machine_b: int, num_bytes: float) -> float:
        """Return seconds to move bytes between two GPUs on these machines."""
        return self._latency[machine_a][machine_b] + num_bytes * self._inverse[machine_a][machine_b]
