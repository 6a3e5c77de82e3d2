"""L5 mutation of whole columns: a stage of all replicas at once changes its place in the pipeline (extension).

The ends of a pipeline hold the vocabulary matrices and its start the most activations, so the small-memory machines
belong in the middle. No exchange of single stages gets there without passing through worse plans: it tears the
column's machines apart.
"""

from __future__ import annotations

from plans.search.genome import Genome
from plans.search.layouts import LayerSplit, TaskLayout
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.workflow import RlTask

#: Share of draws that move a column elsewhere; the others exchange two.
MOVE_SHARE = 0.4
#: Share of draws that also go back to the split by speed: a split drawn for another order rarely fits.
RESPLIT_SHARE = 0.5


def reorder_columns(_tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Return the candidate with the columns of one task in another order, or None where no task has two stages."""
    tasks: list[RlTask] = [task for task, layout in genome.layouts.items() if layout.pp > 1]
    if not tasks:
        return None
    task = tasks[rng.below(len(tasks))]
    layout = genome.layouts[task]
    order = list(range(layout.pp))
    a, b = rng.pair(layout.pp)
    if rng.random() < MOVE_SHARE:
        order.insert(b, order.pop(a))
    else:
        order[a], order[b] = order[b], order[a]
    split = LayerSplit.SPEED if rng.random() < RESPLIT_SHARE else layout.split
    return genome.with_layout(task, in_order(layout, order, split))


def in_order(layout: TaskLayout, order: list[int], split: LayerSplit) -> TaskLayout:
    """Return the layout with column `order[j]` as stage j of every replica."""
    tp, pp = layout.tp, layout.pp
    gpus = [
        gpu
        for replica in range(layout.dp)
        for stage in order
        for gpu in layout.gpus[(replica * pp + stage) * tp : (replica * pp + stage + 1) * tp]
    ]
    return TaskLayout(layout.dp, pp, tp, tuple(gpus), split)
