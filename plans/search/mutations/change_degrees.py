"""L4 mutation: another layout for one task, mostly along the machine order, sometimes random."""

from __future__ import annotations

from dataclasses import replace

from plans.search.genome import Genome
from plans.search.layouts import LayerSplit
from plans.search.random_layout import random_layout
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.workflow import RlTask

#: Share of draws that are uniform over all degrees and placements, which keeps every layout reachable.
RANDOM_SHARE = 0.15
#: Share of draws that change the layer split only.
SPLIT_SHARE = 0.15
_SPLITS = tuple(LayerSplit)


def change_degrees(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Return the candidate with new degrees, placement or layer split of one task."""
    tasks: list[RlTask] = list(genome.layouts)
    task = tasks[rng.below(len(tasks))]
    group = genome.group_of(task)
    gpus, drawn = genome.gpus[group], rng.random()
    if drawn < RANDOM_SHARE:
        return genome.with_layout(task, random_layout(tools.problem, task, gpus, rng))
    if drawn < RANDOM_SHARE + SPLIT_SHARE:
        split = _SPLITS[rng.below(len(_SPLITS))]
        now = genome.layouts[task]
        return None if now.pp == 1 or split is now.split else genome.with_layout(task, replace(now, split=split))
    guesses = tools.ranker.guesses(task, gpus)
    layout = guesses.build(guesses.random_recipe(rng))
    return None if layout is None or layout == genome.layouts[task] else genome.with_layout(task, layout)
