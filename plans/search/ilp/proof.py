"""Branch and bound over groupings: the program of each, tightened and refuted until the best plan is proved."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plans.cost.overlap import Objective
from plans.memory import WEIGHT_OWNERS
from plans.search.brute_force import JointSearch
from plans.search.brute_force_grids import Degrees
from plans.search.brute_force_walk import NOISE, Best
from plans.search.budget import Meter
from plans.search.genome import Genome
from plans.search.groupings import Grouping, task_groupings
from plans.search.ilp.book import BoundBook
from plans.search.ilp.branch import Branch, Stuck
from plans.search.ilp.choices import ChoiceMaker, first_edges, split_interval
from plans.search.ilp.classes import Column, make_columns, require_few_classes
from plans.search.ilp.closing import FIRST_STEPS, PART_STEPS, Closer
from plans.search.ilp.master import Choice, MasterInput, solve_master
from plans.search.ilp.rounding import Rounder
from plans.search.ilp.tighten import tighten
from plans.search.pricing import Price
from plans.search.problem import Problem
from plans.search.solver_status import SolveStatus, relative_gap
from plans.workflow import RlTask, TaskKind

#: Intervals of generation wider than this share of the iteration are split before plans are enumerated.
INTERVAL_SHARE = 1e-3
#: Columns near the one picked that are tightened together with it.
TIGHTEN_TOGETHER = 24
#: Gap asked of the solver, as a share of the gap that is open: its bound is valid whenever it stops.
GAP_SHARE = 0.05
#: Solutions that a descent starts from.
MOST_ROUNDED = 12
#: Growth of the limit of steps when a choice is tried again.
LIMIT_GROWTH = 8


@dataclass(slots=True)
class ProofCounts:
    """What a proof took."""

    programs: int = 0
    """Programs solved."""
    refuted: int = 0
    """Choices refuted."""
    stuck: int = 0
    """Enumerations that hit their limit."""
    program_s: float = 0.0
    """Seconds in the solver, its input included (by the budget's clock)."""


class Proof:
    """Proves the best plan, or improves it."""

    def __init__(
        self,
        problem: Problem,
        meter: Meter,
        best: Best,
        *,
        solver: str,
        tolerance: float,
        part_steps: int = PART_STEPS,
        objective: Objective = Objective.PHASES,
        on_step: Callable[[], None],
    ) -> None:
        """Build the classes of every task.

        Args:
            problem: the problem.
            meter: budget.
            best: best plan known; improved in place.
            solver: `highs` or `cbc`.
            tolerance: relative gap at which the best plan counts as proved.
            part_steps: steps of an enumeration that is to refute more than one choice.
            objective: seconds that are minimised.
            on_step: called after each step.

        Raises:
            TooManyClassesError: the classes are too many for the memory, or for the budget.
        """
        self.problem, self.meter, self.best, self.solver, self.tolerance = problem, meter, best, solver, tolerance
        self.on_step = on_step
        self.counts = ProofCounts()
        self.book = BoundBook(problem)
        self.search = JointSearch(problem, generation_bound=self.book.generation_s, objective=objective)
        self.closer = Closer(self.search, meter, best, tolerance, part_steps)
        require_few_classes(self.search)
        self.columns = {
            task: make_columns(self.search, self.book, task, lambda: meter.is_spent) for task in problem.workflow.tasks
        }
        for column in self.columns[RlTask.ACTOR_GENERATION]:
            column.edges = first_edges(column, self.book)
        self.maker = ChoiceMaker(self.search, self.book, self.columns)
        self.rounder = Rounder(self.search, self.book, self.columns, lambda: not meter.is_spent)
        self._rounded: set[object] = set()
        self._cuts: dict[RlTask, tuple[float, float]] = {}
        self._groupings: list[Grouping] = list(task_groupings(problem.workflow))
        self._sizes = [len(members) for members in self.search.members]
        self._capacity = self.book.of[RlTask.ACTOR_GENERATION].capacity_bytes.tolist()

    def run(self) -> float:
        """Work until proved or the budget is spent; return the proved lower bound of every plan.

        Infinite where no plan exists.
        """
        if not all(self.columns.values()):
            return math.inf
        heap = self._branches()
        self._first_look([branch for *_, branch in heap])
        heap = [(branch.bound_s, index, branch) for _, index, branch in heap if math.isfinite(branch.bound_s)]
        heapq.heapify(heap)
        while heap and not self._is_closed(heap[0][0]) and not self.meter.is_spent:
            _, index, branch = heapq.heappop(heap)
            stuck = branch.next_stuck()
            if stuck is None:
                self._solve(branch)
            else:
                self._close(branch, stuck.chosen, stuck.bound_s, stuck.limit * LIMIT_GROWTH)
            if math.isfinite(branch.bound_s):
                heapq.heappush(heap, (branch.bound_s, index, branch))
            self.on_step()
        # What was refuted holds no plan better than the best by more than the tolerance.
        return min(heap[0][0] if heap else math.inf, self._proved_s())

    def _first_look(self, branches: Sequence[Branch]) -> None:
        """Relax the program of every grouping, then sharpen the columns for those that are left."""
        for branch in branches:
            if not self._is_closed(branch.bound_s) and not self.meter.is_spent:
                self._solve(branch)
                self.on_step()
        live = [branch for branch in branches if not self._is_closed(branch.bound_s)]
        if live:
            self._groupings = [branch.grouping for branch in live]
            self._cuts.clear()
            for task in self.problem.workflow.of_kind(TaskKind.TRAINING):
                for degrees in dict.fromkeys(column.cls.degrees for column in self.columns[task]):
                    self._share_split(task, degrees)
        for branch in live:
            branch.is_relaxed = True

    def _share_split(self, task: RlTask, degrees: Degrees) -> bool:
        """Sharpen the columns of a task by what its replicas have in common, their layer split; tell whether it did."""
        columns = self.columns[task]
        same = [column for column in columns if column.cls.degrees == degrees]
        if task.kind is TaskKind.GENERATION or self.meter.is_spent or min(degrees.dp, degrees.pp) == 1:
            return False
        most_s = self._most_s(task)
        if all(column.seconds >= most_s for column in same) or not self.book.of[task].share_split(degrees, most_s):
            return False
        for column in same:
            column.seconds = max(column.seconds, self.book.seconds(task, column.cls))
        columns[:] = sorted(
            (column for column in columns if math.isfinite(column.seconds)),
            key=lambda column: (column.seconds, column.held_bytes),
        )
        self.maker.forget()
        return True

    def _most_s(self, task: RlTask) -> float:
        kept = self._cuts.get(task)
        if kept is None or kept[0] != self.best.score_s:
            kept = self._cuts[task] = (
                self.best.score_s,
                self.maker.most_s(self._groupings, task, self._proved_s()),
            )
        return kept[1]

    def _proved_s(self) -> float:
        return self.best.score_s * (1.0 - self.tolerance)

    def _is_closed(self, bound_s: float) -> bool:
        return bound_s >= self._proved_s()

    def _branches(self) -> list[tuple[float, int, Branch]]:
        least = self.maker.least()
        heap = []
        for index, grouping in enumerate(task_groupings(self.problem.workflow)):
            if len(grouping) <= self.problem.view.num_gpus:
                bound_s = self.search.bound_s(grouping, least)
                heap.append((bound_s, index, Branch(grouping, bound_s)))
        heapq.heapify(heap)
        return heap

    def _solve(self, branch: Branch) -> None:
        """Solve a grouping's program, then refine what it picked."""
        cutoff_s = self._proved_s()
        relaxed, branch.is_relaxed = branch.is_relaxed, False
        choices = self.maker.choices(branch.grouping, cutoff_s, relaxed=relaxed, refuted=branch.refuted)
        if not all(choices.values()):
            branch.program_s = math.inf
            return
        scale_s = cutoff_s if math.isfinite(cutoff_s) else max(branch.program_s, 1e-9)
        data = MasterInput(
            grouping=branch.grouping,
            mode=self.problem.job.mode,
            eta=self.problem.model.eta,
            choices=choices,
            gpus=self._sizes,
            capacity_bytes=self._capacity,
            owners={} if relaxed else WEIGHT_OWNERS,
            refuted=branch.refuted,
            cutoff_s=cutoff_s,
            scale_s=scale_s,
            objective=self.search.objective,
        )
        begin = self.meter.elapsed_s
        answer = solve_master(
            data,
            solver=self.solver,
            time_limit_s=self._seconds_left(),
            relaxed=relaxed,
            gap=max(1e-7, GAP_SHARE * relative_gap(self.best.score_s, branch.program_s)),
        )
        self.counts.programs += 1
        self.counts.program_s += self.meter.elapsed_s - begin
        if answer.verdict.status is SolveStatus.INFEASIBLE:
            branch.program_s = math.inf
            return
        if answer.bound_s is not None:
            branch.program_s = max(branch.program_s, answer.bound_s)
        if answer.chosen is not None and not self._is_closed(branch.program_s):
            self._round(branch, answer.chosen)
            self._refine(branch, answer.chosen)

    def _round(self, branch: Branch, chosen: Mapping[RlTask, Choice]) -> None:
        """Look for better plans near a solution, once per set of classes."""
        classes = {task: choice.column.cls for task, choice in chosen.items()}
        key = (branch.grouping, tuple(classes.values()))
        if key not in self._rounded and len(self._rounded) < MOST_ROUNDED:
            self._rounded.add(key)
            self.rounder.descend(branch.grouping, classes, self._offer)

    def _offer(self, price: Price, genome: Genome) -> None:
        self.meter.spend()
        if price.score_s < self.best.score_s * (1.0 - NOISE):
            self.best.offer(price.score_s, genome)

    def _seconds_left(self) -> float | None:
        seconds = self.meter.budget.seconds
        return None if seconds is None else max(0.05, seconds - self.meter.elapsed_s)

    def _refine(self, branch: Branch, chosen: Mapping[RlTask, Choice]) -> None:
        """Sharpen the columns picked; where they are sharp, enumerate the plans of the choice."""
        changed = [self._tighten_near(choice.column) for choice in chosen.values()]
        generation = chosen[RlTask.ACTOR_GENERATION]
        curve = self.book.curve(generation.column.cls.degrees, generation.column.cls.counts)
        low, high = generation.interval
        if curve.seconds(low) - curve.seconds(high) > INTERVAL_SHARE * branch.program_s and high > low + 1.0:
            split_interval(generation.column, generation.interval)
            changed.append(True)
        if any(changed):
            self.maker.forget()
        else:
            columns = {task: choice.column for task, choice in chosen.items()}
            self._close(branch, columns, branch.program_s, FIRST_STEPS)

    def _tighten_near(self, column: Column) -> bool:
        """Tighten a column and the ones next to it, which would be picked next."""
        if column.is_tight:
            return False
        if self._share_split(column.task, column.cls.degrees):
            return True
        changed = tighten(self.search, column)
        if changed:
            columns = self.columns[column.task]
            near = [other for other in columns if not other.is_tight and other.seconds <= column.seconds]
            for other in near[:TIGHTEN_TOGETHER]:
                tighten(self.search, other)
        return changed

    def _close(self, branch: Branch, chosen: Mapping[RlTask, Column], bound_s: float, limit: int) -> None:
        part = self.closer.refute(branch.grouping, chosen, self.maker.least(), limit)
        if part is not None:
            self.counts.refuted += 1
            branch.refuted.append(part)
            if not part:
                branch.program_s = math.inf
                branch.stuck.clear()
            return
        self.counts.stuck += 1
        branch.stuck.append(Stuck(chosen, bound_s, limit))
        if chosen not in branch.refuted:
            branch.refuted.append(chosen)
