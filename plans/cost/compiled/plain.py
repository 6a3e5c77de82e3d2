"""Tables as plain tuples, for functions that Python calls again and again.

A call with plain tuples begins after two microseconds, one with named tuples after six: numba tells their types apart.
"""

from __future__ import annotations

from plans.cost.compiled.jit import borrowed, compiled
from plans.cost.compiled.tables import MemoryTables, Rings, Tables

PlainTables = tuple[tuple[object, ...], tuple[object, ...], tuple[object, ...], tuple[object, ...]]
"""`Tables` without names: the fields before the memory, the memory, the fields up to the rings, the rings."""


def plain_tables(tables: Tables) -> PlainTables:
    """Return the tables without names."""
    at = Tables._fields.index("memory")
    fields = tuple(tables)
    return fields[:at], tuple(tables.memory), fields[at + 1 : -1], tuple(tables.rings)


@compiled
def named(plain: PlainTables) -> Tables:
    """Undo `plain_tables`; the arrays are borrowed for the call."""
    a, m, b, r = plain
    memory = MemoryTables(borrowed(m[0]), borrowed(m[1]), borrowed(m[2]), borrowed(m[3]), m[4], m[5])
    rings = Rings(borrowed(r[0]), borrowed(r[1]), borrowed(r[2]), borrowed(r[3]), borrowed(r[4]), borrowed(r[5]))
    return Tables(
        borrowed(a[0]), borrowed(a[1]), borrowed(a[2]), borrowed(a[3]), borrowed(a[4]), borrowed(a[5]),
        borrowed(a[6]), borrowed(a[7]), borrowed(a[8]), memory, borrowed(b[0]), borrowed(b[1]), borrowed(b[2]), rings,
    )  # fmt: skip
