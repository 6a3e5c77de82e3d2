"""Exhaustive search: the oracle of the tests, and the last step of the exact method.

Plan space (`brute_force` is exhaustive over it, and `ilp` proves its optima in it):

* every grouping of `task_groupings` (all set partitions; generation alone in async mode);
* every disjoint choice of GPUs for the groups, and for each task any of its group's GPUs, used or not;
* per task every (dp, pp, tp) that an engine can run (`all_degrees`), uniform over its replicas;
* every assignment of those GPUs to tasklets, tensor parallelism across machines included;
* every `LayerSplit`; layers, samples and decode batches then follow from the balancing rule that all searches use
  (`plans.search.pricing.Pricer`).

Symmetry is used over the GPUs of a machine and over replicas (`plans.search.brute_force_grids`), and partial plans
whose parts alone cost as much as the best plan are dropped: costs are non-negative and the iteration is monotone in
each of them. Both can be switched off for the smallest clusters.
"""

from __future__ import annotations

from collections.abc import Mapping

from plans.cost.overlap import Objective
from plans.search.balancing import Balancing
from plans.search.brute_force_prices import GenerationBound, JointPrices
from plans.search.brute_force_walk import NOISE, Best, TaskClass, Tick, Walk
from plans.search.groupings import Grouping, task_groupings
from plans.search.problem import Problem
from plans.workflow import RlTask


def brute_force(
    problem: Problem,
    balancing: Balancing | None = None,
    *,
    symmetric: bool = True,
    prune: bool = True,
    lower_s: Mapping[RlTask, float] | None = None,
    generation_bound: GenerationBound | None = None,
    objective: Objective = Objective.PHASES,
) -> Best:
    """Return the cheapest plan of the plan space; `score_s` is infinite where no plan fits.

    Args:
        problem: a tiny cluster (3 GPUs for four tasks; a few more with the bounds).
        balancing: load-balancing strategies.
        symmetric: use symmetry.
        prune: drop partial plans that alone cost as much as the best.
        lower_s: proved lower bounds of tasks, to drop partial plans earlier; absent = 0.
        generation_bound: proved lower bound of generation, for the same; absent = none.
        objective: seconds that are minimised.
    """
    search = JointSearch(
        problem,
        balancing,
        symmetric=symmetric,
        prune=prune,
        generation_bound=generation_bound,
        objective=objective,
    )
    best = Best()
    for grouping in task_groupings(problem.workflow):
        if len(grouping) <= problem.view.num_gpus:
            search.run(grouping, best, lower_s=lower_s)
    return best


class JointSearch(JointPrices):
    """Depth-first enumeration of the placements of all tasks of one grouping."""

    def run(
        self,
        grouping: Grouping,
        best: Best,
        *,
        classes: Mapping[RlTask, TaskClass] | None = None,
        lower_s: Mapping[RlTask, float] | None = None,
        tick: Tick | None = None,
        tolerance: float = NOISE,
    ) -> None:
        """Enumerate the plans of a grouping that can be cheaper than `best`, and keep what is.

        Args:
            grouping: task grouping.
            best: best plan so far; improved in place.
            classes: placements of a task are restricted to its class here; a task without an entry is free.
            lower_s: proved lower bounds of tasks in seconds; absent = 0.
            tick: called per step.
            tolerance: relative improvement below which a plan is not looked for.

        Raises:
            LimitReachedError: from `tick`; the enumeration is not complete.
        """
        Walk(self, grouping, best, classes or {}, lower_s or {}, tick, 1.0 - tolerance).place(0)
