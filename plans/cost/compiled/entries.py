"""Doors to the compiled cost model that searches go through again and again.

They take the tables as plain tuples: numba tells the type of those in a microsecond, but takes a hundred for named ones.
"""

from __future__ import annotations

from plans.cost.compiled.jit import compiled
from plans.cost.compiled.tables import FloatArray, IntArray, MemoryTables, PlainTables, Rings, Tables
from plans.cost.compiled.whole_plan import price_alone, price_plan, score_candidate


@compiled
def _named(plain: PlainTables) -> Tables:
    """Undo `plain_tables`."""
    a, m, b, r = plain
    memory = MemoryTables(m[0], m[1], m[2], m[3], m[4], m[5])
    rings = Rings(r[0], r[1], r[2], r[3], r[4], r[5])
    return Tables(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], memory, b[0], b[1], b[2], rings)


@compiled
def score(plain: PlainTables, strategies: IntArray, shape: IntArray, gpus: IntArray) -> tuple[float, float]:
    """Call `score_candidate`."""
    return score_candidate(_named(plain), strategies, shape, gpus)


@compiled
def alone(
    plain: PlainTables, strategies: IntArray, task: int, row: IntArray, gpus: IntArray, held_bytes: float
) -> tuple[float, float]:
    """Call `price_alone`."""
    return price_alone(_named(plain), strategies, task, row, gpus, held_bytes)


@compiled
def whole(
    plain: PlainTables, shape: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, rooms: IntArray,
    batches: IntArray, seconds: FloatArray,
) -> float:  # fmt: skip
    """Call `price_plan`."""
    return price_plan(_named(plain), shape, gpus, layers, samples, rooms, batches, seconds)
