"""The exact minimum of one task over a class, where the class is small enough to enumerate."""

from __future__ import annotations

import math

from plans.search.brute_force import JointSearch
from plans.search.brute_force_grids import RankOrder, Stock, canonical_grids
from plans.search.ilp.classes import Column
from plans.search.layouts import TaskLayout
from plans.workflow import TaskKind

#: Placements per class beyond which its fluid bound is kept.
MOST_PLACEMENTS = 600


def tighten(search: JointSearch, column: Column) -> bool:
    """Raise a column's bound to the exact minimum of its class; tell whether that changed it.

    Generation is left alone: its seconds depend on the memory that other tasks leave.
    """
    if column.is_tight:
        return False
    column.is_tight = True
    if column.task.kind is TaskKind.GENERATION:
        return False
    degrees, counts = column.cls.degrees, column.cls.counts
    order = RankOrder.BY_MACHINE if column.task.kind is TaskKind.TRAINING else RankOrder.NONE
    stock = Stock((), tuple(tuple(members) for members in search.members))
    best, seen = math.inf, 0
    for gpus in canonical_grids(degrees, stock, search.machine_of, order, counts):
        for split in search.splits(degrees.pp):
            seen += 1
            if seen > MOST_PLACEMENTS:
                return False
            layout = TaskLayout(degrees.dp, degrees.pp, degrees.tp, gpus, split)
            seconds, share = search.pricer.task_s(column.task, layout)
            if share <= 1.0 + 1e-9:
                best = min(best, seconds)
    changed = best > column.seconds * (1.0 + 1e-9)
    column.seconds = max(column.seconds, best)
    return changed
