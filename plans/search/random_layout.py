"""A layout drawn at random: the paper's starting point, and what keeps every layout reachable."""

from __future__ import annotations

from collections.abc import Sequence

from plans.search.degrees import pp_degrees, tp_degrees
from plans.search.layouts import LayerSplit, TaskLayout
from plans.search.limits import TaskLimit
from plans.search.problem import Problem
from plans.search.seeds import Draws
from plans.workflow import RlTask, shape_of

_SPLITS = tuple(LayerSplit)


def random_layout(problem: Problem, task: RlTask, gpus: Sequence[int], rng: Draws) -> TaskLayout:
    """Return degrees drawn uniformly by factor, and tasklets placed uniformly at random on a group's GPUs.

    Under a limit of the task's engine: the same within the machines, and on one machine where the task must be.
    """
    if (limit := problem.limits.of(task)) is not None:
        return _limited_layout(problem, task, gpus, limit, rng)
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


def _limited_layout(problem: Problem, task: RlTask, gpus: Sequence[int], limit: TaskLimit, rng: Draws) -> TaskLayout:
    """Return a random layout that an engine can run: stages inside machines, degrees within the bounds."""
    shape, view = shape_of(problem.job, task), problem.view
    machines: dict[int, list[int]] = {}
    for gpu in gpus:
        machines.setdefault(int(view.machine_of[gpu]), []).append(gpu)
    if limit.is_on_one_machine:
        chosen = sorted(machines)[rng.below(len(machines))]
        machines = {chosen: machines[chosen]}
    tps = tp_degrees(shape, max(len(members) for members in machines.values()))
    types = {view.type_names[int(view.type_of[gpu])] for members in machines.values() for gpu in members}
    if limit.most_tp is not None and not types <= limit.thread_types:
        tps = tuple(tp for tp in tps if tp <= limit.most_tp)
    tp = tps[rng.below(len(tps))]
    units: list[list[int]] = []
    for members in machines.values():
        drawn = [members[index] for index in rng.permutation(len(members))]
        units += [drawn[start : start + tp] for start in range(0, len(drawn) - tp + 1, tp)]
    pps = tuple(pp for pp in pp_degrees(shape, len(units)) if limit.most_pp is None or pp <= limit.most_pp)
    pp = pps[rng.below(len(pps))]
    most = min(len(units) // pp, problem.job.num_samples)
    dp = most if rng.random() < 0.5 else rng.between(1, most)
    order = [units[index] for index in rng.permutation(len(units))[: dp * pp]]
    split = _SPLITS[rng.below(len(_SPLITS))]
    return TaskLayout(dp, pp, tp, tuple([gpu for unit in order for gpu in unit]), split)
