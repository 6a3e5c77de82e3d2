"""Times over links and rings (`plans.cost.collectives`): plain rings at once, the others from what Python solved."""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import copy_to, least_of, non_zero
from plans.cost.compiled.jit import inner
from plans.cost.compiled.tables import (
    LATENCY_PER_STEP,
    RINGS_ASKED,
    RINGS_KEPT,
    FloatArray,
    IntArray,
    Rings,
    Tables,
)


@inner
def edge_s(tables: Tables, first: int, second: int, num_bytes: float) -> float:
    """Return seconds to move bytes between two GPUs on these machines."""
    return tables.latency_s[first, second] + num_bytes * tables.s_per_byte[first, second]


@inner
def ring_steps(tables: Tables, size: int) -> float:
    """Return how often a ring of so many GPUs pays the latency of an edge."""
    return 2.0 * (size - 1) if tables.facts[LATENCY_PER_STEP] else 1.0


@inner
def pair_s(tables: Tables, machines: IntArray, first: int, second: int, tp: int, num_bytes: float) -> float:
    """Return the fastest transfer between a GPU of one stage and one of another; `first`, `second`: their starts."""
    fastest = math.inf
    for a in range(first, first + tp):
        for b in range(second, second + tp):
            fastest = min(fastest, edge_s(tables, machines[a], machines[b], num_bytes))
    return fastest


@inner
def ring_s(tables: Tables, machines: IntArray, start: int, count: int, stride: int, num_bytes: float) -> float:
    """Return the slowest edge of the best ring over GPUs start, start + stride, ... (`count` of them)."""
    if count == 1:
        return 0.0
    first, is_inside = machines[start], True
    for index in range(1, count):
        if machines[start + index * stride] != first:
            is_inside = False
            break
    if is_inside:
        return ring_steps(tables, count) * tables.latency_s[first, first] + num_bytes * tables.s_per_byte[first, first]
    counts = np.zeros(len(tables.region), dtype=np.int64)
    for index in range(count):
        counts[machines[start + index * stride]] += 1
    return ring_of_counts_s(tables, counts, num_bytes)


@inner
def ring_of_counts_s(tables: Tables, counts: IntArray, num_bytes: float) -> float:
    """Return the slowest edge of the best ring over so many GPUs of each machine [M]."""
    total, places = np.int64(0), non_zero(counts)
    k = len(places)
    held = np.empty(k, dtype=np.int64)
    for i in range(k):
        held[i] = counts[places[i]]
        total += held[i]
    if total <= 1:
        return 0.0
    steps = ring_steps(tables, total)
    cost = np.empty((k, k))
    for i in range(k):
        for j in range(k):
            a, b = places[i], places[j]
            cost[i, j] = steps * tables.latency_s[a, b] + num_bytes * tables.s_per_byte[a, b]
    if k == 1:
        return cost[0, 0]
    if total == 2:
        return cost[0, 1]
    if k == 2 and least_of(held) == 1:
        larger = 0 if held[0] > 1 else 1
        return max(cost[0, 1], cost[larger, larger])
    plain = _plain_ring(held, cost)
    if plain >= 0.0:
        return plain
    return _searched_ring_s(tables, counts, steps, num_bytes)


@inner
def _plain_ring(counts: IntArray, cost: FloatArray) -> float:
    """Return the slowest edge of the ring through the machines in their order, or -1 where it may not be the best.

    It is the best where no ring can do without so slow an edge: every GPU has two edges, and the edges of a ring join
    all machines.
    """
    k = len(counts)
    slowest = 0.0
    for i in range(k):
        slowest = max(slowest, cost[i - 1, i])
        if counts[i] > 1:
            slowest = max(slowest, cost[i, i])
    for i in range(k):
        # The two fastest edges of a GPU of the machine.
        first = second = math.inf
        for j in range(k):
            edges = counts[j] - 1 if i == j else counts[j]
            for _ in range(min(2, edges)):
                if cost[i, j] < first:
                    first, second = cost[i, j], first
                elif cost[i, j] < second:
                    second = cost[i, j]
        if second >= slowest:
            return slowest
    return slowest if _slowest_of_tree(cost) >= slowest else -1.0


@inner
def _slowest_of_tree(cost: FloatArray) -> float:
    """Return the slowest edge of a spanning tree whose slowest edge is fastest (Prim)."""
    k = len(cost)
    reach, is_in = np.empty(k), np.zeros(k, dtype=np.int64)
    copy_to(reach, cost[0])
    is_in[0] = 1
    slowest = 0.0
    for _ in range(k - 1):
        nearest = -1
        for i in range(k):
            if not is_in[i] and (nearest < 0 or reach[i] < reach[nearest]):
                nearest = i
        slowest = max(slowest, reach[nearest])
        is_in[nearest] = 1
        for i in range(k):
            reach[i] = min(reach[i], cost[nearest, i])
    return slowest


@inner
def _searched_ring_s(tables: Tables, counts: IntArray, steps: float, num_bytes: float) -> float:
    """Return the time of a ring that was solved before; ask for it otherwise."""
    rings = tables.rings
    one, two = _hashes(tables, counts, steps, num_bytes)
    at = find_ring(rings.keys, one, two)
    if rings.keys[at, 0] == one and rings.keys[at, 1] == two:
        return steps * rings.edges[at, 0] + num_bytes * rings.edges[at, 1]
    asked = rings.num_asked[0]
    for index in range(asked):
        if rings.asked_keys[index, 0] == one and rings.asked_keys[index, 1] == two:
            return 0.0
    rings.num_asked[0] = asked + 1
    if asked < RINGS_ASKED:
        rings.asked_keys[asked, 0] = one
        rings.asked_keys[asked, 1] = two
        copy_to(rings.asked_counts[asked], counts)
        rings.asked_bytes[asked] = num_bytes
    return 0.0


@inner
def keep_rings(rings: Rings, edges: FloatArray) -> None:
    """Keep the first rings that were asked for, with latency and seconds per byte of their slowest edges [rings, 2]."""
    for index in range(len(edges)):
        at = find_ring(rings.keys, rings.asked_keys[index, 0], rings.asked_keys[index, 1])
        for column in range(2):
            rings.keys[at, column] = rings.asked_keys[index, column]
            rings.edges[at, column] = edges[index, column]


@inner
def find_ring(keys: np.ndarray, one: np.uint64, two: np.uint64) -> int:
    """Return the place of a ring among the keys, or the free place where it belongs."""
    at = np.int64(one & np.uint64(RINGS_KEPT - 1))
    while keys[at, 0] != np.uint64(0) and not (keys[at, 0] == one and keys[at, 1] == two):
        at = (at + 1) & (RINGS_KEPT - 1)
    return at


@inner
def _hashes(tables: Tables, counts: IntArray, steps: float, num_bytes: float) -> tuple[np.uint64, np.uint64]:
    """Return two hashes of the GPUs per machine and the order, with ties, of the link classes' times."""
    one, two = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
    for machine in range(len(counts)):
        one, two = _mixed(one, two, counts[machine])
    classes = tables.link_classes
    num_classes = classes.shape[1]
    times = np.empty(num_classes)
    for i in range(num_classes):
        times[i] = steps * classes[0, i] + num_bytes * classes[1, i]
    for i in range(num_classes):
        rank = np.int64(0)
        for j in range(num_classes):
            rank += times[j] < times[i]
        one, two = _mixed(one, two, rank)
    return max(one, np.uint64(1)), two


@inner
def _mixed(one: np.uint64, two: np.uint64, value: int) -> tuple[np.uint64, np.uint64]:
    """Return both hashes with a number mixed in (the finalisers of SplitMix64 and of MurmurHash3)."""
    one = one + np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    one = (one ^ (one >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    one = (one ^ (one >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    one = one ^ (one >> np.uint64(31))
    two = (two ^ np.uint64(value)) + np.uint64(0x165667B19E3779F9)
    two = (two ^ (two >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    two = (two ^ (two >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    two = two ^ (two >> np.uint64(33))
    return one, two
