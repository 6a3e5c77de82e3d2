"""Branch and bound over groupings: the program of each, tightened and refuted until the best plan is proved."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plans.memory import WEIGHT_OWNERS
from plans.search.brute_force import Best, JointSearch
from plans.search.budget import Meter
from plans.search.groupings import task_groupings
from plans.search.ilp.book import BoundBook
from plans.search.ilp.branch import Branch, Stuck
from plans.search.ilp.choices import ChoiceMaker, first_edges, split_interval
from plans.search.ilp.classes import Column, make_columns
from plans.search.ilp.closing import FIRST_STEPS, PART_STEPS, Closer
from plans.search.ilp.master import Choice, MasterInput, solve_master
from plans.search.ilp.tighten import tighten
from plans.search.problem import Problem
from plans.search.solver_status import SolveStatus, relative_gap
from plans.workflow import RlTask

#: Intervals of generation wider than this share of the iteration are split before plans are enumerated.
INTERVAL_SHARE = 1e-3
#: Columns near the one picked that are tightened together with it.
TIGHTEN_TOGETHER = 24
#: Gap asked of the solver, as a share of the gap that is open: its bound is valid whenever it stops.
GAP_SHARE = 0.05
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
            on_step: called after each step.
        """
        self.problem, self.meter, self.best, self.solver, self.tolerance = problem, meter, best, solver, tolerance
        self.on_step = on_step
        self.counts = ProofCounts()
        self.book = BoundBook(problem)
        self.search = JointSearch(problem, generation_bound=self.book.generation_s)
        self.closer = Closer(self.search, meter, best, tolerance, part_steps)
        self.columns = {task: make_columns(self.search, self.book, task) for task in problem.workflow.tasks}
        for column in self.columns[RlTask.ACTOR_GENERATION]:
            column.edges = first_edges(column, self.book)
        self.maker = ChoiceMaker(problem, self.book, self.columns)
        self._sizes = [len(members) for members in self.search.members]
        self._capacity = self.book.of[RlTask.ACTOR_GENERATION].capacity_bytes.tolist()

    def run(self) -> float:
        """Work until proved or the budget is spent; return the proved lower bound of every plan.

        Infinite where no plan exists.
        """
        if not all(self.columns.values()):
            return math.inf
        heap = self._branches()
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

    def _proved_s(self) -> float:
        return self.best.score_s * (1.0 - self.tolerance)

    def _is_closed(self, bound_s: float) -> bool:
        return bound_s >= self._proved_s()

    def _branches(self) -> list[tuple[float, int, Branch]]:
        least = self.maker.least()
        heap = []
        for index, grouping in enumerate(task_groupings(self.problem.workflow)):
            if len(grouping) <= self.problem.view.num_gpus:
                bound_s = self.maker.bound_s(grouping, least)
                heap.append((bound_s, index, Branch(grouping, bound_s)))
        heapq.heapify(heap)
        return heap

    def _solve(self, branch: Branch) -> None:
        """Solve a grouping's program, then refine what it picked."""
        cutoff_s = self._proved_s()
        relaxed, branch.is_relaxed = branch.is_relaxed, False
        choices = self.maker.choices(branch.grouping, cutoff_s, relaxed=relaxed)
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
            self._refine(branch, answer.chosen)

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
