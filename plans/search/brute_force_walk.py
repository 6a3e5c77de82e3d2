"""One depth-first enumeration of the placements of all tasks of a grouping; what cannot be best is dropped early."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plans.memory import WEIGHT_OWNERS
from plans.search.brute_force_grids import Degrees, RankOrder, Stock, canonical_grids, every_grid
from plans.search.brute_force_prices import JointPrices
from plans.search.genome import Genome
from plans.search.groupings import Grouping
from plans.search.layouts import TaskLayout
from plans.workflow import RlTask, TaskKind

#: Cost below which a plan counts as better than the best one, relative: rounding noise is no improvement.
NOISE = 1e-12
_RANKS = {
    RlTask.ACTOR_TRAINING: RankOrder.ALL,
    RlTask.ACTOR_GENERATION: RankOrder.ALL,
    RlTask.CRITIC_TRAINING: RankOrder.BY_MACHINE,
}


@dataclass(frozen=True, slots=True)
class TaskClass:
    """A class of placements of a task: its degrees and how many GPUs of each machine it uses."""

    degrees: Degrees
    """Degrees."""
    counts: tuple[int, ...]
    """GPUs per machine [M]."""


@dataclass(slots=True)
class Best:
    """The best plan so far."""

    score_s: float = math.inf
    """Seconds per iteration; infinite before there is one."""
    genome: Genome | None = None
    """The plan."""

    def offer(self, score_s: float, genome: Genome) -> bool:
        """Keep a plan that is cheaper; tell whether it was."""
        if not score_s < self.score_s:
            return False
        self.score_s, self.genome = score_s, genome
        return True


class LimitReachedError(Exception):
    """Raised by a `tick` to end an enumeration before it is complete."""


Tick = Callable[[bool], None]
"""Called per step, with True where it prices a plan; may raise `LimitReachedError`."""


class Walk:
    """One enumeration."""

    def __init__(
        self,
        search: JointPrices,
        grouping: Grouping,
        best: Best,
        classes: Mapping[RlTask, TaskClass],
        lower_s: Mapping[RlTask, float],
        tick: Tick | None,
        factor: float,
    ) -> None:
        self.search, self.grouping, self.best, self.classes = search, grouping, best, classes
        self.tick, self.factor = tick, factor
        self.group_of = {task: index for index, tasks in enumerate(grouping) for task in tasks}
        self.owner = [-1] * len(search.machine_of)
        self.held = [0.0] * len(search.machine_of)
        self.layouts: dict[RlTask, TaskLayout] = {}
        self.seconds = {task: lower_s.get(task, 0.0) for task in search.problem.workflow.tasks}

    def place(self, depth: int) -> None:
        """Place the tasks from `order[depth]` on in every way."""
        if self.search.prune and not self._can_win():
            return
        task = self.search.order[depth]
        if task.kind is TaskKind.GENERATION:
            for layout in self._options(task):
                self._price({**self.layouts, task: layout})
            return
        kept = self.seconds[task]
        for seconds, layout in self._ranked(task):
            self.seconds[task] = max(seconds, kept)
            if self.search.prune and not self._can_win():
                break
            self._with(task, layout, depth)
        self.seconds[task] = kept

    def _ranked(self, task: RlTask) -> list[tuple[float, TaskLayout]]:
        priced = [(self.search.task_s(task, layout), layout) for layout in self._options(task)]
        if self.search.prune:
            priced = [(seconds, layout) for seconds, layout in priced if math.isfinite(seconds)]
        return sorted(priced, key=lambda entry: entry[0])

    def _with(self, task: RlTask, layout: TaskLayout, depth: int) -> None:
        group = self.group_of[task]
        before = self.owner.copy(), self.held.copy()
        for gpu in layout.gpus:
            self.owner[gpu] = group
        if self._hold(task, layout) or not self.search.prune:
            self.layouts[task] = layout
            self.place(depth + 1)
            del self.layouts[task]
        self.owner, self.held = before

    def _hold(self, task: RlTask, layout: TaskLayout) -> bool:
        """Add the resident bytes that the task surely has; tell whether they fit."""
        if task.kind is TaskKind.GENERATION or WEIGHT_OWNERS.get(task) in self.grouping[self.group_of[task]]:
            return True  # it may use its owner's weights in place
        stages = self.search.held_bytes(task, layout)
        capacity, fits = self.search.capacity, True
        for index, gpu in enumerate(layout.gpus):
            self.held[gpu] += stages[index // layout.tp % layout.pp]
            fits = fits and self.held[gpu] <= capacity[gpu]
        return fits

    def _can_win(self) -> bool:
        bound = self.search.bound_s(self.grouping, self.seconds, self.layouts)
        return bound < self.best.score_s * self.factor

    def _options(self, task: RlTask) -> Iterator[TaskLayout]:
        step = self.tick
        for degrees, counts in self._shapes(task):
            for gpus in self._grids(task, degrees, counts):
                for split in self.search.splits(degrees.pp):
                    if step is not None:
                        step(False)
                    yield TaskLayout(degrees.dp, degrees.pp, degrees.tp, gpus, split)

    def _shapes(self, task: RlTask) -> list[tuple[Degrees, tuple[int, ...] | None]]:
        restricted = self.classes.get(task)
        if restricted is not None:
            shapes: list[tuple[Degrees, tuple[int, ...] | None]] = [(restricted.degrees, restricted.counts)]
        else:
            shapes = [(degrees, None) for degrees in self.search.classes(task)]
        if task.kind is not TaskKind.GENERATION or self.search.generation_bound is None:
            return shapes
        rooms = self._rooms(task)
        split = [
            (degrees, counts)
            for degrees, chosen in shapes
            for counts in ([chosen] if chosen is not None else counts_of(degrees.size, [len(room) for room in rooms]))
        ]
        return [(degrees, counts) for degrees, counts in split if self._generation_can_win(degrees, counts, rooms)]

    def _rooms(self, task: RlTask) -> list[list[float]]:
        """Return free bytes of the GPUs that generation may use, by machine, largest first."""
        group, search = self.group_of[task], self.search
        return [
            sorted(
                (max(0.0, search.usable[g] - self.held[g]) for g in gpus if self.owner[g] in {-1, group}), reverse=True
            )
            for gpus in search.members
        ]

    def _generation_can_win(self, degrees: Degrees, counts: Sequence[int], rooms: Sequence[Sequence[float]]) -> bool:
        bound, task = self.search.generation_bound, RlTask.ACTOR_GENERATION
        if bound is None or not self.search.prune:
            return True
        if any(count > len(room) for count, room in zip(counts, rooms, strict=True)):
            return False
        free = sum(sum(room[:count]) for count, room in zip(counts, rooms, strict=True))
        kept = self.seconds[task]
        self.seconds[task] = max(kept, bound(degrees, counts, free))
        wins = self._can_win()
        self.seconds[task] = kept
        return wins

    def _grids(self, task: RlTask, degrees: Degrees, counts: tuple[int, ...] | None) -> Iterator[tuple[int, ...]]:
        search, group = self.search, self.group_of[task]
        if not search.symmetric:
            yield from every_grid(degrees, [g for g, owner in enumerate(self.owner) if owner in {-1, group}])
            return
        named = tuple(gpu for gpu, owner in enumerate(self.owner) if owner == group)
        fresh = tuple(tuple(g for g in gpus if self.owner[g] == -1) for gpus in search.members)
        same = self._owners_grid(task, degrees, counts)
        if same is not None:
            yield same  # weights in place: found first, and never lost to the order of replicas or ranks
        for gpus in canonical_grids(degrees, Stock(named, fresh), search.machine_of, _RANKS.get(task, RankOrder.NONE),
                                    counts):  # fmt: skip
            if gpus != same:
                yield gpus

    def _owners_grid(self, task: RlTask, degrees: Degrees, counts: tuple[int, ...] | None) -> tuple[int, ...] | None:
        owner = WEIGHT_OWNERS.get(task)
        if owner is None or owner not in self.layouts or self.group_of[owner] != self.group_of[task]:
            return None
        layout = self.layouts[owner]
        if (layout.dp, layout.pp, layout.tp) != (degrees.dp, degrees.pp, degrees.tp):
            return None
        used = [0] * self.search.num_machines
        for gpu in layout.gpus:
            used[self.search.machine_of[gpu]] += 1
        return layout.gpus if counts is None or tuple(used) == counts else None

    def _price(self, layouts: dict[RlTask, TaskLayout]) -> None:
        if self.tick is not None:
            self.tick(True)
        gpus = [sorted({g for task in tasks for g in layouts[task].gpus}) for tasks in self.grouping]
        ordered = {task: layouts[task] for task in self.search.problem.workflow.tasks}
        genome = Genome(self.grouping, tuple(tuple(members) for members in gpus), ordered)
        score_s = self.search.price(genome).score_s
        if score_s < self.best.score_s * (1.0 - NOISE):
            self.best.offer(score_s, genome)


def counts_of(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to take `total` GPUs, at most so many of each machine."""
    if len(most) == 1:
        if total <= most[0]:
            yield (total,)
        return
    for first in range(min(total, most[0]), -1, -1):
        for rest in counts_of(total - first, most[1:]):
            yield (first, *rest)
