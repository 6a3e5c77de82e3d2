"""Mutation that gives one task the layout of another task of its group (extension).

Generation that runs in the training layout needs no re-sharding and no second copy of the weights, and two inference
tasks of equal models want the same placement: such pairs are unlikely to arise by independent draws.
"""

from __future__ import annotations

from plans.search.genome import Genome
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.workflow import shape_of


def copy_layout(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Return the candidate with one layout copied, or None where no group has two tasks that differ."""
    pairs = [
        (source, target)
        for tasks in genome.grouping
        for source in tasks
        for target in tasks
        if source is not target
        and genome.layouts[source] != genome.layouts[target]
        and shape_of(tools.problem.job, source).layers >= genome.layouts[source].pp
        and shape_of(tools.problem.job, target) == shape_of(tools.problem.job, source)
    ]
    if not pairs:
        return None
    source, target = pairs[rng.below(len(pairs))]
    return genome.with_layout(target, genome.layouts[source])
