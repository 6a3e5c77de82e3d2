"""A layout drawn at random: the paper's starting point, and what keeps every layout reachable."""

from __future__ import annotations

from collections.abc import Sequence

from plans.search.degrees import pp_degrees, tp_degrees
from plans.search.layouts import LayerSplit, TaskLayout
from plans.search.problem import Problem
from plans.search.seeds import Draws
from plans.workflow import RlTask, shape_of

_SPLITS = tuple(LayerSplit)


def random_layout(problem: Problem, task: RlTask, gpus: Sequence[int], rng: Draws) -> TaskLayout:
    """Return degrees drawn uniformly by factor, and tasklets placed uniformly at random on a group's GPUs."""
    shape = shape_of(problem.job, task)
    tps = tp_degrees(shape, len(gpus))
    tp = tps[rng.below(len(tps))]
    pps = pp_degrees(shape, len(gpus) // tp)
    pp = pps[rng.below(len(pps))]
    most = min(len(gpus) // (tp * pp), problem.job.num_samples)
    dp = most if rng.random() < 0.5 else rng.between(1, most)
    chosen = rng.permutation(len(gpus))[: dp * pp * tp]
    split = _SPLITS[rng.below(len(_SPLITS))]
    return TaskLayout(dp, pp, tp, tuple([gpus[index] for index in chosen]), split)
