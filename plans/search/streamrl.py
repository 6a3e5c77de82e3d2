"""Baseline: StreamRL's allocator for asynchronous jobs (re-implementation after hetrl.md 12.4).

Two groups, generation and everything else, each on GPUs of one type in one data centre. Inside one data centre
x + y <= n GPUs are split to minimise the slower side; over two, the faster side is shrunk until it just keeps up.
Where no such pair of pools holds the models, pools get wider: one type anywhere, then one region, then the whole
cluster. Placement inside a pool uses the ranked layouts with equal samples and layers, and the real cost model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plans.search.arms import unit_of
from plans.search.balancing import Balancing
from plans.search.genome import Genome
from plans.search.outcome import outcome_of
from plans.search.pricing import Price
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent, SearchRun
from plans.search.tools import SearchTools
from plans.workflow import RlTask

Pool = tuple[int, ...]

#: Sizes tried when the faster side is shrunk.
SHRINK_STEPS = 8


@dataclass(frozen=True)
class StreamRlPlanner:
    """StreamRL's allocator."""

    name: ClassVar[str] = "streamrl"

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the best pair of pools of the first tier that has a feasible one."""
        tools = SearchTools(problem, Balancing.none())
        incumbent: Incumbent[Genome] = Incumbent(run)
        for pools in _tiers(problem):
            for generation in pools:
                for rest in pools:
                    if run.meter.is_spent and incumbent.best is not None:
                        break
                    if generation == rest:
                        self._split(tools, incumbent, generation)
                    elif not set(generation) & set(rest):
                        self._match(tools, incumbent, generation, rest)
            if incumbent.best is not None:
                break
        return outcome_of(problem, tools, incumbent, self.name)

    def _split(self, tools: SearchTools, incumbent: Incumbent[Genome], pool: Pool) -> None:
        """One data centre: every x + y = n in units; generation takes the front of the pool."""
        unit = min(unit_of(len(pool)), max(1, len(pool) // 8))
        for count in range(unit, len(pool), unit):
            self._offer(tools, incumbent, pool[:count], pool[count:])

    def _match(self, tools: SearchTools, incumbent: Incumbent[Genome], generation: Pool, rest: Pool) -> None:
        """Two data centres: both whole, then the faster side smaller while the iteration does not get longer."""
        whole = self._offer(tools, incumbent, generation, rest)
        if whole is None:
            return
        genome, price = whole
        evaluation = tools.pricer.evaluation(genome)
        if evaluation is None or not price.is_feasible:
            return
        phases = evaluation.phases
        shrinks_generation = phases.generation_s < phases.inference_s + phases.training_s
        side = generation if shrinks_generation else rest
        for step in range(1, SHRINK_STEPS):
            count = len(side) - step * max(1, len(side) // SHRINK_STEPS)
            if count < 1:
                break
            smaller = side[:count]
            sides = (smaller, rest) if shrinks_generation else (generation, smaller)
            tried = self._offer(tools, incumbent, *sides, prefers_ties=True)
            if tried is None or price < tried[1]:
                break

    @staticmethod
    def _offer(
        tools: SearchTools,
        incumbent: Incumbent[Genome],
        generation: Pool,
        rest: Pool,
        *,
        prefers_ties: bool = False,
    ) -> tuple[Genome, Price] | None:
        others = tuple(task for task in tools.problem.workflow.tasks if task is not RlTask.ACTOR_GENERATION)
        grouping = ((RlTask.ACTOR_GENERATION,), others)
        if len(generation) < tools.problem.least_gpus(grouping[0]) or len(rest) < tools.problem.least_gpus(others):
            return None
        genome = tools.seeder.fitted(grouping, (generation, rest))
        price = tools.pricer.price(genome)
        incumbent.run.meter.spend()
        offer = incumbent.offer_or_prefer if prefers_ties else incumbent.offer
        offer(price.score_s, genome)
        return genome, price


def _tiers(problem: Problem) -> Iterator[list[Pool]]:
    """Yield pools from the narrowest notion of homogeneous to the widest."""
    view = problem.view
    pairs = list(zip(view.type_of.tolist(), view.region_of.tolist(), strict=True))
    for key in (lambda pair: pair, lambda pair: (pair[0],), lambda pair: (pair[1],), lambda _pair: ()):
        pools: dict[tuple[int, ...], list[int]] = {}
        for gpu, pair in enumerate(pairs):
            pools.setdefault(key(pair), []).append(gpu)
        yield [tuple(members) for members in pools.values()]
