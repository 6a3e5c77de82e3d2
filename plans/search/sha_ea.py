"""HetRL's search: nested successive halving over arms, an evolutionary algorithm in each, then a polish (ours)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from plans.cost.compact import compact_of
from plans.search.arms import Arm, arms_by_grouping, groupings_that_fit
from plans.search.balancing import Balancing
from plans.search.crew import Crew, Task, Workshop, make_crew
from plans.search.evolution import ArmState, EvolutionSettings
from plans.search.genome import Genome
from plans.search.layouts import TaskLayout
from plans.search.outcome import outcome_of
from plans.search.polish import WalkState
from plans.search.pricing import Price
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent, SearchRun
from plans.search.seeds import draws
from plans.search.successive_halving import NestedHalving, least_budget

#: Most arms per grouping.
ARM_CAP = 16
#: Arms per grouping at the least: sizes in proportion to the work, and the same in whole machines.
LEAST_ARMS = 2
#: Evaluations that each arm of the first round should get; fewer arms are made when the budget does not allow it.
FIRST_ROUND = 3
#: Share of the budget for the halving; the rest polishes what it found.
HALVING_SHARE = 0.4
#: Walks at the start and at the end of the polish, and its rounds.
WALKS = (6, 2)
POLISH_ROUNDS = 8
#: Evaluations per second assumed before anything was measured.
ASSUMED_RATE = 2000.0
#: Evaluations that measure the speed at the start of a search with a budget in seconds.
PROBE = 40


@dataclass(frozen=True)
class ShaEaPlanner:
    """The default method."""

    name: ClassVar[str] = "sha-ea"
    settings: EvolutionSettings = field(default_factory=EvolutionSettings)
    """Parameters of the evolutionary algorithm."""
    balancing: Balancing = field(default_factory=Balancing)
    """Load-balancing strategies in use."""
    halving_share: float = HALVING_SHARE
    """Share of the budget for the halving; 1 = the published algorithm without the polish."""

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the cheapest placement found within the budget."""
        incumbent: Incumbent[Genome] = Incumbent(run)
        workshop = Workshop(problem, self.settings, self.balancing)
        crew = make_crew(problem, workshop, self.settings, self.balancing, incumbent)
        try:
            _Search(self, problem, run, incumbent, workshop, crew).go()
        finally:
            crew.close()
        return outcome_of(problem, workshop.tools, incumbent, self.name)


class _Search:
    """One search: the order of its parts and the division of the budget."""

    def __init__(
        self,
        planner: ShaEaPlanner,
        problem: Problem,
        run: SearchRun,
        incumbent: Incumbent[Genome],
        workshop: Workshop,
        crew: Crew,
    ) -> None:
        self.planner, self.problem, self.run = planner, problem, run
        self.incumbent, self.workshop, self.crew = incumbent, workshop, crew
        self.rate = ASSUMED_RATE

    def go(self) -> None:
        """Halve, then polish until the budget is spent."""
        extra = self._warm_start()
        self._probe()
        groups = self._arms()
        survivors: list[ArmState] = []
        if groups:
            self.incumbent.phase = "halving"
            survivors = self._halve(groups)
        self.incumbent.phase = "polish"
        self._polish(extra, survivors)

    def _warm_start(self) -> list[tuple[float, Genome]]:
        if self.run.warm_start is None:
            return []
        try:
            compact = compact_of(self.run.warm_start, self.problem.cluster)
        except ValueError:
            return []  # replicas of unlike shape: outside this search; the caller still compares with the plan itself
        gpus = tuple(
            tuple(sorted({int(gpu) for task in tasks for gpu in compact.tasks[task].flat})) for tasks in compact.groups
        )
        layouts = {
            task: TaskLayout(entry.dp, entry.pp, entry.tp, tuple(entry.flat.tolist()))
            for task, entry in compact.tasks.items()
        }
        genome = Genome(compact.groups, gpus, layouts)
        price = self.workshop.tools.pricer.price(genome)
        self.run.meter.spend()
        if not price.is_feasible:
            return []
        self.incumbent.offer(price.score_s, genome)
        return [(price.score_s, genome)]

    def _probe(self) -> None:
        """Measure evaluations per second (budget in seconds only)."""
        meter = self.run.meter
        if meter.is_counted:
            return
        groups = arms_by_grouping(self.problem, self.run.seed, cap=1, most_groupings=1)
        if not groups:
            return
        state = ArmState.start(groups[0][0], self.run.seed)
        seeds = self.planner.settings.seeds
        used = self.workshop.evolution.grow(state, seeds, lambda: not meter.is_spent, self._offer)
        begin = meter.elapsed_s
        probe = self.workshop.evolution.grow(state, PROBE, lambda: not meter.is_spent, self._offer)
        meter.spend(used + probe)
        self.rate = probe / max(1e-6, meter.elapsed_s - begin) * max(1, self.run.workers)

    def _offer(self, price: Price, genome: Genome) -> None:
        self.incumbent.offer(price.score_s, genome)

    def _remaining(self) -> float:
        """Return the evaluations that the budget still allows, estimated for a budget in seconds."""
        left = self.run.meter.remaining_evaluations
        if left is not None:
            return float(left)
        seconds = self.run.meter.budget.seconds or 0.0
        return self.run.meter.remaining_fraction * seconds * self.rate

    def _arms(self) -> list[list[Arm]]:
        """Return as many arms as the budget can look at."""
        budget = self.planner.halving_share * self._remaining()
        count, cap = sum(1 for _ in groupings_that_fit(self.problem)), ARM_CAP
        while cap > LEAST_ARMS and least_budget(count, cap, FIRST_ROUND) > budget:
            cap //= 2
        while count > 1 and least_budget(count, cap, FIRST_ROUND) > budget:
            count -= 1
        return arms_by_grouping(self.problem, self.run.seed, cap=cap, most_groupings=count)

    def _halve(self, groups: list[list[Arm]]) -> list[ArmState]:
        states = {arm: ArmState.start(arm, self.run.seed) for arms in groups for arm in arms}
        total, meter = self._remaining(), self.run.meter
        reserve = (1.0 - self.planner.halving_share) * total

        def grow(jobs: Sequence[tuple[Arm, int]]) -> None:
            tasks = [Task(states[arm], count) for arm, count in jobs]
            begin, before = meter.elapsed_s, meter.evaluations
            for state in self.crew.run(tasks):
                if isinstance(state, ArmState):
                    states[state.arm] = state
            self._measure(meter.elapsed_s - begin, meter.evaluations - before)

        halving: NestedHalving[Arm] = NestedHalving(
            grow,
            lambda arm: states[arm].score,
            lambda: max(0.0, self._remaining() - reserve),
            lambda: not meter.is_spent and self._remaining() > reserve,
        )
        halving.run(groups)
        return sorted(states.values(), key=lambda state: state.score)

    def _measure(self, seconds: float, evaluations: int) -> None:
        if not self.run.meter.is_counted and seconds > 0.0 and evaluations:
            self.rate = evaluations / seconds

    def _polish(self, extra: list[tuple[float, Genome]], survivors: list[ArmState]) -> None:
        walks = self._walks(extra, survivors)
        first, last = WALKS
        for index in range(POLISH_ROUNDS):
            if not walks or self.run.meter.is_spent:
                break
            share = self._remaining() / (POLISH_ROUNDS - index) / len(walks)
            if index == POLISH_ROUNDS - 1 and self.run.meter.is_counted:
                share += 1.0  # what rounding left over
            heat = 1.0 - index / POLISH_ROUNDS, 1.0 - (index + 1) / POLISH_ROUNDS
            begin, before = self.run.meter.elapsed_s, self.run.meter.evaluations
            done = self.crew.run([Task(walk, max(1, int(share)), heat) for walk in walks])
            self._measure(self.run.meter.elapsed_s - begin, self.run.meter.evaluations - before)
            walks = sorted((walk for walk in done if isinstance(walk, WalkState)), key=lambda walk: walk.best[0])
            keep = max(last, first - (index + 1) * (first - last + 1) // POLISH_ROUNDS)
            walks = walks[:keep]

    def _walks(self, extra: list[tuple[float, Genome]], survivors: list[ArmState]) -> list[WalkState]:
        """Return walks from the best candidates, of different groupings as far as possible."""
        starts = [(self.workshop.tools.pricer.price(genome), genome) for _, genome in extra]
        best = [state.best for state in survivors if state.best is not None]
        by_grouping = {genome.grouping: (price, genome) for price, genome in reversed(best)}
        starts += sorted(by_grouping.values(), key=lambda entry: entry[0])
        walks = [
            WalkState(rng=draws(self.run.seed, "walk", index), current=start, best=start)
            for index, start in enumerate(starts[: WALKS[0]])
        ]
        return [walk for walk in walks if walk.best[0].overflow_bytes < float("inf")]
