"""From classes to the columns of one grouping's program: what can still beat the best plan."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set

import numpy as np

from plans.cost.model import Fanout
from plans.cost.transfer import WeightLine
from plans.memory import WEIGHT_OWNERS
from plans.search.brute_force import JointSearch
from plans.search.brute_force_walk import TaskClass
from plans.search.groupings import Grouping
from plans.search.ilp.book import BoundBook
from plans.search.ilp.classes import Column
from plans.search.ilp.master import Choice
from plans.workflow import RlTask, TaskKind, shape_of


class ChoiceMaker:
    """Makes the columns of a grouping's program."""

    def __init__(self, search: JointSearch, book: BoundBook, columns: Mapping[RlTask, Sequence[Column]]) -> None:
        """Keep the classes of every task."""
        problem = search.problem
        self.search, self.problem, self.book, self.columns = search, problem, book, columns
        job = problem.job
        self._line = WeightLine.of(shape_of(job, RlTask.ACTOR_TRAINING), job.weight_bytes_per_parameter)
        self._sizes = [int((problem.view.machine_of == m).sum()) for m in range(len(problem.view.machine_names))]
        self._transfers: dict[object, float] = {}
        self._made: dict[tuple[RlTask, bool, bool, bool], list[Choice]] = {}

    def least(self) -> dict[RlTask, float]:
        """Return the least bound of each task over its classes."""
        return {task: min(column.seconds for column in columns) for task, columns in self.columns.items()}

    def most_s(self, groupings: Sequence[Grouping], task: RlTask, cutoff_s: float) -> float:
        """Return seconds from which on a task is too slow for a plan below the cut-off in any of these groupings."""
        least = self.least()

        def is_dear(seconds: float) -> bool:
            return all(self.search.bound_s(grouping, {**least, task: seconds}) >= cutoff_s for grouping in groupings)

        low, high = 0.0, cutoff_s
        if not is_dear(high):
            return math.inf
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if is_dear(middle) else (middle, high)
        return high

    def choices(
        self, grouping: Grouping, cutoff_s: float, *, relaxed: bool, refuted: Sequence[Mapping[RlTask, Column]] = ()
    ) -> dict[RlTask, list[Choice]]:
        """Return the columns of each task that can be part of a plan below the cut-off.

        A column is left out when the grouping costs as much as the cut-off even with every other task at its least,
        or when another one dominates it: exchanging it for that one keeps the program feasible and its objective no
        worse. Columns that a refutation names dominate nothing.
        """
        group_of = {task: g for g, tasks in enumerate(grouping) for task in tasks}
        least, offered = self.least(), {}
        for task in self.columns:
            owner = WEIGHT_OWNERS.get(task)
            shares = owner is not None and group_of[task] == group_of[owner]
            apart = group_of[task] != group_of[RlTask.ACTOR_TRAINING]
            every = self._every(task, shares=shares, apart=apart, relaxed=relaxed)

            def is_dear(choice: Choice, task: RlTask = task) -> bool:
                return self.search.bound_s(grouping, {**least, task: choice.seconds + choice.transfer_s}) >= cutoff_s

            # Dearer choices come later, and the iteration is monotone in each task.
            every = every[: bisect_left(every, True, key=is_dear)]
            is_tied = not relaxed and any(
                owner is task and group_of.get(other, -1) == group_of[task] for other, owner in WEIGHT_OWNERS.items()
            )
            if not is_tied:
                named = {part[task].cls for part in refuted if task in part}
                every = undominated(every, anywhere=len(grouping) == 1, but=named)
            offered[task] = every
        return offered

    def forget(self) -> None:
        """Make the choices anew: columns have changed."""
        self._made.clear()

    def _every(self, task: RlTask, *, shares: bool, apart: bool, relaxed: bool) -> list[Choice]:
        """Return all choices of a task, cheapest first."""
        key = (task, shares, apart and task.kind is TaskKind.GENERATION, relaxed)
        made = self._made.get(key)
        if made is None:
            maker = self._generation if task.kind is TaskKind.GENERATION else self._plain
            made = [choice for column in self.columns[task] for choice in maker(column, shares=shares, apart=apart)]
            made.sort(key=lambda choice: choice.seconds + choice.transfer_s)
            self._made[key] = made
        return made

    def _plain(self, column: Column, *, shares: bool, apart: bool) -> list[Choice]:
        del apart  # only generation receives weights
        copy = Choice(column, column.seconds, column.held_bytes, column.working_bytes)
        if not shares:
            return [copy]
        return [copy, Choice(column, column.seconds, 0.0, column.working_bytes, in_place=True)]

    def _generation(self, column: Column, *, shares: bool, apart: bool) -> list[Choice]:
        degrees, counts = column.cls.degrees, column.cls.counts
        curve, cache = self.book.curve(degrees, counts), self.book.of[column.task].cache_per_gpu(degrees)
        bounds = self.book.of[column.task]
        # Cache and weights may fill the usable bytes only, the row of the program offers the whole capacity.
        unused = float(((bounds.capacity_bytes - bounds.usable_bytes) * np.asarray(counts)).sum())
        transfer = self._transfer_s(column) if apart else 0.0
        choices = []
        for low, high in zip(column.edges, column.edges[1:], strict=False):
            seconds, working = curve.seconds(high), low * cache * (1.0 - 1e-9) + unused
            held = {False: column.held_bytes, True: 0.0} if shares else {False: column.held_bytes}
            for in_place, bytes_ in held.items():
                choices.append(Choice(column, seconds, bytes_, working, transfer, in_place, (low, high)))
        return choices

    def _transfer_s(self, column: Column) -> float:
        """Return a lower bound of the transfer to generation on GPUs that don't train."""
        key = (column.cls.degrees.pp * column.cls.degrees.tp, tuple(min(n, 1) for n in column.cls.counts))
        found = self._transfers.get(key)
        if found is None:
            found = self._transfers[key] = self._make_transfer_s(*key)
        return found

    def _make_transfer_s(self, shards: int, used: Sequence[int]) -> float:
        problem, model = self.problem, self.problem.model
        is_direct = model.fanout is Fanout.DIRECT
        num_bytes = self._line.total_bytes * model.delta_fraction / (shards if is_direct else 1)
        edges = problem.evaluator.links.edge_matrix(range(len(used)), num_bytes)
        lonely = np.array(self._sizes) < 2
        edges[np.diag_indices(len(used))] = np.where(lonely, math.inf, edges.diagonal())
        into = edges.min(axis=0)[np.asarray(used) > 0]
        # Direct: the mean receiver gets its share of a full copy over at best the fastest link of any receiver.
        # A copy per machine: the last machine has it no earlier than its own fastest link allows.
        seconds = float(into.min()) if is_direct else float(into.max())
        return model.sync_factor * seconds * (1.0 - 1e-9)


def undominated(choices: Sequence[Choice], *, anywhere: bool, but: Set[TaskClass] = frozenset()) -> list[Choice]:
    """Return the choices that no other one beats in seconds, bytes and transfer together, in their order.

    Args:
        choices: choices of a task whose class ties no other task to it, cheapest first.
        anywhere: whether the GPUs do not matter (a single group); otherwise only choices on the same GPUs compare.
        but: classes that beat nothing.
    """
    beating: dict[tuple[int, ...], list[Choice]] = {}
    kept: list[Choice] = []
    for choice in choices:
        others = beating.setdefault(() if anywhere else choice.column.cls.counts, [])
        if any(_beats(other, choice) for other in others):
            continue
        kept.append(choice)
        # Weights used in place tie the choice to the class of their owner: it beats nothing.
        if not choice.in_place and choice.column.cls not in but:
            others.append(choice)
    return kept


def _beats(other: Choice, choice: Choice) -> bool:
    return (
        other.seconds <= choice.seconds
        and other.held_bytes <= choice.held_bytes
        and other.held_bytes + other.working_bytes <= choice.held_bytes + choice.working_bytes
        and other.working_bytes <= choice.working_bytes
        and other.transfer_s <= choice.transfer_s
    )


def first_edges(column: Column, book: BoundBook) -> list[float]:
    """Return the first intervals of generation's concurrency: from one per replica, each half as wide again."""
    low = float(column.cls.degrees.size)
    high = book.most_concurrency(column.cls.degrees, column.cls.counts)
    count = max(1, math.ceil(math.log(max(high / low, 1.0)) / math.log(1.5)))
    return [low, *(float(edge) for edge in np.geomspace(low, max(high, low), count + 1)[1:])]


def split_interval(column: Column, interval: tuple[float, float]) -> None:
    """Split an interval of a column in two."""
    middle = math.sqrt(interval[0] * interval[1])
    column.edges = sorted({*column.edges, middle})
