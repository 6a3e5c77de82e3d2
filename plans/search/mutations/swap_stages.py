"""L5 mutation of whole stages: two TP groups of a task exchange places (extension: keeps TP inside machines)."""

from __future__ import annotations

from plans.search.genome import Genome
from plans.search.layouts import TaskLayout
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.workflow import RlTask


def swap_stages(_tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Return the candidate with two stages exchanged, or None where the drawn task has one stage in all."""
    tasks: list[RlTask] = list(genome.layouts)
    task = tasks[rng.below(len(tasks))]
    layout = genome.layouts[task]
    count = layout.dp * layout.pp
    if count < 2:
        return None
    a, b = rng.pair(count)
    gpus = list(layout.gpus)
    span_a, span_b = (slice(index * layout.tp, (index + 1) * layout.tp) for index in (a, b))
    gpus[span_a], gpus[span_b] = gpus[span_b], gpus[span_a]
    return genome.with_layout(task, TaskLayout(layout.dp, layout.pp, layout.tp, tuple(gpus), layout.split))
