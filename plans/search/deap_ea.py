"""Baseline: a standard evolutionary algorithm on the library DEAP (in HetRL too; its variant is unpublished).

(mu + lambda) evolution, uniform crossover, mutation by redrawing genes, tournament selection: DEAP's own
`eaMuPlusLambda`. The genome is flat: a group per task, a group and a placement key per GPU, a degree gene per task. A
decoder repairs it: groups without tasks or GPUs are dissolved, tasklets go to GPUs in the order of their keys.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from plans.search.balancing import Balancing
from plans.search.degrees import pp_degrees, tp_degrees
from plans.search.genome import Genome
from plans.search.layouts import TaskLayout
from plans.search.outcome import outcome_of
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent, SearchRun
from plans.search.tools import SearchTools
from plans.spec.job import Mode
from plans.workflow import RlTask, shape_of

#: Fitness of a placement that does not fit: worse than any feasible one, smaller overflow is better.
INFEASIBLE_S = 1e9


class _BudgetSpentError(Exception):
    """Ends DEAP's loop from inside an evaluation."""


class _Decoder:
    """Genes in [0, 1) to a candidate."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tasks = problem.workflow.tasks
        self.num_gpus = problem.view.num_gpus
        self.is_async = problem.workflow.mode is Mode.ASYNC

    @property
    def length(self) -> int:
        """Genes of a genome."""
        return 3 * len(self.tasks) + 2 * self.num_gpus

    def decode(self, genes: list[float]) -> Genome | None:
        """Return the candidate; None where repair leaves a group without GPUs."""
        count, num = len(self.tasks), self.num_gpus
        homes = [int(gene * count) for gene in genes[:count]]
        if self.is_async:  # generation has group 0 for itself
            homes = [0 if task is RlTask.ACTOR_GENERATION else 1 + home % (count - 1)
                     for task, home in zip(self.tasks, homes, strict=True)]  # fmt: skip
        labels = sorted(set(homes))
        grouping = tuple(
            tuple(t for t, home in zip(self.tasks, homes, strict=True) if home == label) for label in labels
        )
        keys = genes[count + num : count + 2 * num]
        members: list[list[int]] = [[] for _ in labels]
        for gpu, gene in enumerate(genes[count : count + num]):
            members[int(gene * len(labels))].append(gpu)
        if not all(members):
            return None
        ordered = [sorted(group, key=lambda gpu: (keys[gpu], gpu)) for group in members]
        degree_genes = genes[count + 2 * num :]
        layouts = {}
        for index, task in enumerate(self.tasks):
            group = next(g for g, tasks in enumerate(grouping) if task in tasks)
            layouts[task] = self._layout(task, ordered[group], degree_genes[2 * index], degree_genes[2 * index + 1])
        return Genome(grouping, tuple(tuple(sorted(group)) for group in members), layouts)

    def _layout(self, task: RlTask, gpus: list[int], tp_gene: float, pp_gene: float) -> TaskLayout:
        shape = shape_of(self.problem.job, task)
        tps = tp_degrees(shape, len(gpus))
        tp = tps[int(tp_gene * len(tps))]
        pps = pp_degrees(shape, len(gpus) // tp)
        pp = pps[int(pp_gene * len(pps))]
        dp = min(len(gpus) // (tp * pp), self.problem.job.num_samples)
        return TaskLayout(dp, pp, tp, tuple(gpus[: dp * pp * tp]))


@dataclass(frozen=True)
class DeapPlanner:
    """Standard evolutionary algorithm."""

    name: ClassVar[str] = "deap"
    population: int = 50
    """mu and lambda."""
    crossover: float = 0.6
    """Share of offspring made by crossover."""
    mutation: float = 0.4
    """Share of offspring made by mutation."""
    balancing: Balancing = field(default_factory=Balancing)
    """Load-balancing strategies in use."""

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the best placement that evolution finds within the budget."""
        tools = SearchTools(problem, self.balancing)
        incumbent: Incumbent[Genome] = Incumbent(run)
        decoder = _Decoder(problem)

        def evaluate(genes: list[float]) -> tuple[float]:
            if run.meter.is_spent:
                raise _BudgetSpentError
            run.meter.spend()
            genome = decoder.decode(genes)
            if genome is None:
                return (2.0 * INFEASIBLE_S,)
            price = tools.pricer.price(genome)
            if not price.is_feasible:
                return (INFEASIBLE_S + min(price.overflow_bytes / 1e9, INFEASIBLE_S / 2.0),)
            incumbent.offer(price.score_s, genome)
            return (price.score_s,)

        with _seeded(run.seed):
            self._evolve(evaluate, decoder.length)
        return outcome_of(problem, tools, incumbent, self.name)

    def _evolve(self, evaluate: object, length: int) -> None:
        from deap import algorithms, base, tools

        class _Minimise(base.Fitness):  # type: ignore[misc]  # DEAP has no types
            weights = (-1.0,)

        class _Individual(list[float]):
            def __init__(self, genes: Iterator[float]) -> None:
                super().__init__(genes)
                self.fitness = _Minimise()

        toolbox = base.Toolbox()
        toolbox.register("individual", tools.initRepeat, _Individual, random.random, length)
        toolbox.register("population", tools.initRepeat, list, toolbox.individual)
        toolbox.register("evaluate", evaluate)
        toolbox.register("mate", tools.cxUniform, indpb=0.5)
        toolbox.register("mutate", _redraw, share=3.0 / length)
        toolbox.register("select", tools.selTournament, tournsize=3)
        population = toolbox.population(n=self.population)
        try:
            while True:  # the budget ends it from inside an evaluation
                population, _ = algorithms.eaMuPlusLambda(
                    population, toolbox, mu=self.population, lambda_=self.population, cxpb=self.crossover,
                    mutpb=self.mutation, ngen=50, verbose=False)  # fmt: skip
        except _BudgetSpentError:
            return


def _redraw(genes: list[float], share: float) -> tuple[list[float]]:
    """Redraw each gene with a small probability; one at least."""
    genes[random.randrange(len(genes))] = random.random()
    for index in range(len(genes)):
        if random.random() < share:
            genes[index] = random.random()
    return (genes,)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """DEAP draws from the module `random`: seed it here and put its state back afterwards."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
