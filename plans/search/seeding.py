"""First candidates of an arm: GPUs grown along near machines, layouts that fit together (extension).

HetRL starts from random placements. Seeds that are already sensible make the first ranking of the arms meaningful,
which is what successive halving lives on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from plans.search.genome import Genome
from plans.search.gpu_assignment import PLAIN_STYLES, RANDOM_STYLE, grow_groups
from plans.search.groupings import Grouping
from plans.search.layouts import Arrangement, Recipe, TaskLayout
from plans.search.pricing import Pricer
from plans.search.problem import Problem
from plans.search.random_layout import random_layout
from plans.search.ranked_layout import RankedLayout
from plans.search.ranking import Ranker
from plans.search.seeds import Draws, draws
from plans.workflow import RlTask

#: The seed that is drawn as in the paper, uniformly at levels 3 to 5.
RANDOM_SEED = 7
#: Exchanges of a layout for a leaner one before a group counts as overfull.
_FIT_STEPS = 40


#: Stands for the layouts of a task that has none on its GPUs: slow, and it fills them.
_NOTHING = (RankedLayout(1e9, 1.0, Recipe(0, 1, 1, False, Arrangement.REPLICA_BLOCKS), ()),)


class Seeder:
    """Makes candidates for arms."""

    def __init__(self, problem: Problem, pricer: Pricer, ranker: Ranker) -> None:
        """Keep the tools."""
        self.problem = problem
        self.pricer = pricer
        self.ranker = ranker

    def seed(self, grouping: Grouping, sizes: Sequence[int], index: int, rng: Draws) -> Genome:
        """Return the index-th candidate of an arm: plain growth styles first, then random growth; one is all random.

        With a single group there is nothing to grow, so its candidates differ in their layouts only.
        """
        if len(grouping) == 1 and index:
            return self.random(grouping, sizes, rng)
        style = PLAIN_STYLES[index] if index < len(PLAIN_STYLES) else RANDOM_STYLE
        if index == RANDOM_SEED:
            return self.random(grouping, sizes, rng)
        return self.fitted(grouping, grow_groups(self.problem, grouping, sizes, style, rng))

    def fitted(self, grouping: Grouping, gpus: Sequence[tuple[int, ...]]) -> Genome:
        """Return a candidate on given GPUs with the fastest ranked layouts that fit into memory together."""
        layouts = {}
        for tasks, members in zip(grouping, gpus, strict=True):
            layouts.update(self.fit_group(tasks, members))
        ordered = {task: layouts[task] for task in self.problem.workflow.tasks}
        return Genome(grouping, tuple(gpus), ordered)

    def random(self, grouping: Grouping, sizes: Sequence[int], rng: Draws) -> Genome:
        """Return a candidate drawn at random at levels 3 to 5, as in the paper."""
        drawn = rng.permutation(self.problem.view.num_gpus)
        edges = (0, *accumulate(sizes))
        gpus = tuple(tuple(sorted(drawn[a:b])) for a, b in pairwise(edges))
        layouts = {}
        for tasks, members in zip(grouping, gpus, strict=True):
            for task in tasks:
                layouts[task] = random_layout(self.problem, task, members, rng)
        return Genome(grouping, gpus, {task: layouts[task] for task in self.problem.workflow.tasks})

    def fit_group(
        self, tasks: tuple[RlTask, ...], gpus: tuple[int, ...], *, deep: bool = False
    ) -> dict[RlTask, TaskLayout]:
        """Return a layout per task of one group.

        Starts with the fastest of each and, while the models of some GPU exceed its memory, takes the exchange that
        frees memory at the least loss of time.
        """
        rankings = {task: self.ranker.ranked(task, gpus, tasks, deep=deep) for task in tasks}
        options = {task: ranking.entries or _NOTHING for task, ranking in rankings.items()}
        chosen = dict.fromkeys(tasks, 0)
        for _ in range(_FIT_STEPS):
            if sum(options[task][chosen[task]].share for task in tasks) <= 1.0:
                break
            step = self._leanest_step(options, chosen)
            if step is None:
                break
            chosen[step[0]] = step[1]
        rng = draws(len(gpus), "layouts of last resort")
        return {
            task: ranking.layout(chosen[task]) if ranking.entries else random_layout(self.problem, task, gpus, rng)
            for task, ranking in rankings.items()
        }

    @staticmethod
    def _leanest_step(
        options: dict[RlTask, tuple[RankedLayout, ...]], chosen: dict[RlTask, int]
    ) -> tuple[RlTask, int] | None:
        best, step = math.inf, None
        for task, ranked in options.items():
            now = ranked[chosen[task]]
            share, seconds = now.share, now.seconds
            for index, other in enumerate(ranked):
                freed = share - other.share
                if freed > 1e-6:
                    slower = other.seconds - seconds
                    loss = slower / freed if slower > 0.0 else 0.0
                    if loss < best:
                        best, step = loss, (task, index)
        return step
