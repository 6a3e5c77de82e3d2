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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plans.cost.compact import CompactPlan
from plans.cost.iteration import combine
from plans.cost.overlap import Objective, free_overlap_s
from plans.memory import WEIGHT_OWNERS, TaskMemory
from plans.search.balancing import Balancing, TaskRates
from plans.search.brute_force_grids import Degrees, RankOrder, Stock, canonical_grids, every_grid
from plans.search.degrees import all_degrees
from plans.search.genome import Genome
from plans.search.groupings import Grouping, task_groupings
from plans.search.layouts import LayerSplit, TaskLayout
from plans.search.pricing import UNPLACEABLE, Price, Pricer
from plans.search.problem import Problem
from plans.workflow import RlTask, TaskKind, shape_of

#: Cost below which a plan counts as better than the best one, relative: rounding noise is no improvement.
NOISE = 1e-12


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
GenerationBound = Callable[[Degrees, Sequence[int], float], float]
"""Lower bound of generation on so many GPUs per machine with so many bytes free for its cache in all."""


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


class JointSearch:
    """Depth-first enumeration of the placements of all tasks of one grouping."""

    def __init__(
        self,
        problem: Problem,
        balancing: Balancing | None = None,
        *,
        symmetric: bool = True,
        prune: bool = True,
        generation_bound: GenerationBound | None = None,
        objective: Objective = Objective.PHASES,
    ) -> None:
        """Keep the problem and what depends on it alone."""
        self.problem, self.objective = problem, objective
        self.generation_bound = generation_bound
        view = problem.view
        self.usable: list[float] = np.minimum(
            problem.job.generation.memory_fraction * view.memory_bytes, problem.capacity_bytes
        ).tolist()
        self.pricer = Pricer(problem.evaluator, balancing if balancing is not None else Balancing())
        self.symmetric, self.prune = symmetric, prune
        self.order = tuple(sorted(problem.workflow.tasks, key=lambda task: (_TURN[task.kind], task)))
        self.machine_of: list[int] = problem.view.machine_of.tolist()
        self.num_machines = len(problem.view.machine_names)
        self.members = [[g for g, m in enumerate(self.machine_of) if m == i] for i in range(self.num_machines)]
        self.capacity: list[float] = problem.capacity_bytes.tolist()
        mbs = problem.job.training.micro_batch_size
        self._rates = {
            task: TaskRates(problem.evaluator, task, mbs if task.kind is TaskKind.TRAINING else 1)
            for task in self.order
        }
        self._memory = {task: TaskMemory(problem.job, task) for task in self.order}
        self._uses_layers = self.pricer.balancing.layers
        self._groups: dict[Grouping, dict[RlTask, int]] = {}
        self._times: dict[object, float] = {}
        self._held: dict[object, tuple[float, ...]] = {}

    def price(self, genome: Genome) -> Price:
        """Return the rank of a candidate under the objective."""
        if self.objective is Objective.PHASES:
            return self.pricer.price(genome)
        evaluation = self.pricer.evaluation(genome)
        if evaluation is None:
            return UNPLACEABLE
        if not evaluation.feasible:
            return Price(evaluation.score_s, evaluation.overflow_bytes)
        gpus = {task: frozenset(layout.gpus) for task, layout in genome.layouts.items()}
        mode, moved_s = self.problem.job.mode, evaluation.phases.transfer_s
        return Price(free_overlap_s(mode, evaluation.task_s, gpus, moved_s), evaluation.overflow_bytes)

    def bound_s(
        self, grouping: Grouping, seconds: Mapping[RlTask, float], layouts: Mapping[RlTask, TaskLayout] | None = None
    ) -> float:
        """Return a lower bound of the objective for tasks of at least so many seconds, the transfer left out.

        Args:
            grouping: the grouping.
            seconds: lower bound of each task.
            layouts: what is placed already.
        """
        mode = self.problem.job.mode
        if self.objective is Objective.FREE_OVERLAP:
            gpus = {task: frozenset(layout.gpus) for task, layout in (layouts or {}).items()}
            return free_overlap_s(mode, seconds, gpus, 0.0)
        group_of = self._groups.get(grouping)
        if group_of is None:
            group_of = self._groups[grouping] = {task: g for g, tasks in enumerate(grouping) for task in tasks}
        return combine(mode, seconds, group_of, 0.0, self.problem.model.eta).iteration_s

    def classes(self, task: RlTask) -> list[Degrees]:
        """Return the degrees that a task may have on this cluster."""
        samples = self.problem.job.num_samples
        every = all_degrees(shape_of(self.problem.job, task), self.problem.view.num_gpus)
        return [Degrees(dp, pp, tp) for dp, pp, tp in every if dp <= samples]

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
        _Walk(self, grouping, best, classes or {}, lower_s or {}, tick, 1.0 - tolerance).place(0)

    def task_s(self, task: RlTask, layout: TaskLayout) -> float:
        """Return the seconds of a task that doesn't decode (they depend on no other task); infinite = unplaceable."""
        key = (task, layout.dp, layout.pp, layout.tp, layout.split, *[self.machine_of[g] for g in layout.gpus])
        seconds = self._times.get(key)
        if seconds is None:
            seconds = self._times[key] = self.pricer.task_s(task, layout)[0]
        return seconds

    def held_bytes(self, task: RlTask, layout: TaskLayout) -> tuple[float, ...]:
        """Return resident bytes per stage [pp] of a task that doesn't decode; infinite where no layer split exists."""
        key = (task, layout.dp, layout.pp, layout.tp, layout.split, *[self.machine_of[g] for g in layout.gpus])
        held = self._held.get(key)
        if held is None:
            grid = np.array(layout.gpus, dtype=np.int32).reshape(layout.dp, layout.pp, layout.tp)
            layers = self._rates[task].layers(grid, layout.split if self._uses_layers else LayerSplit.EVEN)
            memory, last = self._memory[task], layout.pp - 1
            held = (math.inf,) * layout.pp
            if layers is not None:
                held = tuple(
                    memory.model_bytes(count, is_first=j == 0, is_last=j == last, tp=layout.tp, dp=layout.dp)
                    for j, count in enumerate(layers)
                )
            self._held[key] = held
        return held

    def splits(self, pp: int) -> Sequence[LayerSplit]:
        """Return the layer splits that can differ."""
        return tuple(LayerSplit) if pp > 1 and self._uses_layers else (LayerSplit.SPEED,)


class _Walk:
    """One enumeration."""

    def __init__(
        self,
        search: JointSearch,
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


#: Order of placement: what everything else depends on first, generation last (its cache gets what memory is left).
_TURN = {TaskKind.TRAINING: 0, TaskKind.INFERENCE: 1, TaskKind.GENERATION: 2}
_RANKS = {
    RlTask.ACTOR_TRAINING: RankOrder.ALL,
    RlTask.ACTOR_GENERATION: RankOrder.ALL,
    RlTask.CRITIC_TRAINING: RankOrder.BY_MACHINE,
}


def compact_plan(search: JointSearch, best: Best) -> CompactPlan | None:
    """Return the balanced placement of the best plan; None where there is none."""
    return None if best.genome is None else search.pricer.compact(best.genome)
