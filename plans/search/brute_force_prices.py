"""What an exhaustive search asks about tasks that are placed one after the other: seconds, bytes, bounds, prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from plans.cost.iteration import combine
from plans.cost.overlap import Objective, free_overlap_s
from plans.memory import TaskMemory
from plans.search.balancing import Balancing, TaskRates
from plans.search.brute_force_grids import Degrees
from plans.search.degrees import all_degrees
from plans.search.genome import Genome
from plans.search.groupings import Grouping
from plans.search.layouts import LayerSplit, TaskLayout
from plans.search.pricing import UNPLACEABLE, Price, Pricer
from plans.search.problem import Problem
from plans.workflow import RlTask, TaskKind, shape_of

#: Order of placement: what everything else depends on first, generation last (its cache gets what memory is left).
_TURN = {TaskKind.TRAINING: 0, TaskKind.INFERENCE: 1, TaskKind.GENERATION: 2}

GenerationBound = Callable[[Degrees, Sequence[int], float], float]
"""Lower bound of generation on so many GPUs per machine with so many bytes free for its cache in all."""


class JointPrices:
    """Prices of placements and of parts of them; what was asked once is kept."""

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
