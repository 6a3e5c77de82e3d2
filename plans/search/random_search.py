"""Baseline: placements drawn uniformly at every level, the best one kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from plans.search.balancing import Balancing
from plans.search.genome import Genome
from plans.search.groupings import Grouping, task_groupings
from plans.search.outcome import outcome_of
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent, SearchRun
from plans.search.seeds import Draws, draws
from plans.search.tools import SearchTools


@dataclass(frozen=True)
class RandomPlanner:
    """Random search, with the same load balancing inside evaluation as the other methods."""

    name: ClassVar[str] = "random"
    balancing: Balancing = field(default_factory=Balancing)
    """Load-balancing strategies in use."""

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the best of as many draws as the budget allows."""
        tools = SearchTools(problem, self.balancing)
        incumbent: Incumbent[Genome] = Incumbent(run)
        rng = draws(run.seed, "random")
        groupings = [g for g in task_groupings(problem.workflow) if len(g) <= problem.view.num_gpus]
        while not run.meter.is_spent:
            grouping = groupings[rng.below(len(groupings))]
            genome = tools.seeder.random(grouping, random_sizes(grouping, problem.view.num_gpus, rng), rng)
            run.meter.spend()
            incumbent.offer(tools.pricer.price(genome).score_s, genome)
        return outcome_of(problem, tools, incumbent, self.name)


def random_sizes(grouping: Grouping, num_gpus: int, rng: Draws) -> tuple[int, ...]:
    """Return a uniformly drawn composition of the GPUs over the groups, each at least one."""
    groups = len(grouping)
    cuts = sorted(rng.sample(range(1, num_gpus), groups - 1))
    edges = [0, *cuts, num_gpus]
    return tuple(b - a for a, b in pairwise(edges))
