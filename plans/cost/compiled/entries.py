"""Doors to the compiled cost model that searches go through again and again.

They take the tables as plain tuples: numba tells the type of those in a microsecond, but needs a hundred for
named ones. Arrays are only borrowed for the call.
"""

from __future__ import annotations

from plans.cost.compiled.jit import borrowed, compiled
from plans.cost.compiled.tables import FloatArray, IntArray, MemoryTables, PlainTables, Rings, Tables
from plans.cost.compiled.whole_plan import price_alone, price_plan, score_candidate


@compiled
def _named(plain: PlainTables) -> Tables:
    """Undo `plain_tables`."""
    a, m, b, r = plain
    memory = MemoryTables(borrowed(m[0]), borrowed(m[1]), borrowed(m[2]), borrowed(m[3]), m[4], m[5])
    rings = Rings(borrowed(r[0]), borrowed(r[1]), borrowed(r[2]), borrowed(r[3]), borrowed(r[4]), borrowed(r[5]))
    return Tables(
        borrowed(a[0]), borrowed(a[1]), borrowed(a[2]), borrowed(a[3]), borrowed(a[4]), borrowed(a[5]),
        borrowed(a[6]), borrowed(a[7]), borrowed(a[8]), memory, borrowed(b[0]), borrowed(b[1]), borrowed(b[2]), rings,
    )  # fmt: skip


@compiled
def score(plain: PlainTables, strategies: IntArray, shape: IntArray, gpus: IntArray) -> tuple[float, float]:
    """Call `score_candidate`."""
    return score_candidate(_named(plain), borrowed(strategies), borrowed(shape), borrowed(gpus))


@compiled
def alone(
    plain: PlainTables, strategies: IntArray, task: int, row: IntArray, gpus: IntArray, held_bytes: float
) -> tuple[float, float]:
    """Call `price_alone`."""
    return price_alone(_named(plain), borrowed(strategies), task, borrowed(row), borrowed(gpus), held_bytes)


@compiled
def whole(
    plain: PlainTables, shape: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, rooms: IntArray,
    batches: IntArray, seconds: FloatArray,
) -> float:  # fmt: skip
    """Call `price_plan`."""
    return price_plan(
        _named(plain), borrowed(shape), borrowed(gpus), borrowed(layers), borrowed(samples), borrowed(rooms),
        borrowed(batches), borrowed(seconds),
    )  # fmt: skip
