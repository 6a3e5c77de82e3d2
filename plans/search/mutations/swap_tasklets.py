"""L5 mutation: two tasklets of a task exchange GPUs, or one moves to a GPU that the task leaves idle."""

from __future__ import annotations

from plans.search.genome import Genome
from plans.search.layouts import TaskLayout
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.workflow import RlTask


def swap_tasklets(_tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Return the candidate with one placement changed, or None where the task has a single GPU."""
    tasks: list[RlTask] = list(genome.layouts)
    task = tasks[rng.below(len(tasks))]
    layout = genome.layouts[task]
    used = set(layout.gpus)
    places = [*layout.gpus, *(gpu for gpu in genome.gpus[genome.group_of(task)] if gpu not in used)]
    if len(places) < 2:
        return None
    x = rng.below(len(layout.gpus))
    y = rng.below(len(places))
    if x == y:
        return None
    places[x], places[y] = places[y], places[x]
    size = len(layout.gpus)
    return genome.with_layout(task, TaskLayout(layout.dp, layout.pp, layout.tp, tuple(places[:size]), layout.split))
