"""Candidate -> balanced compact plan -> price. The only door from the search to the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from plans.cost.compact import CompactPlan, CompactTask
from plans.cost.evaluator import Evaluation, PlanEvaluator
from plans.memory import TaskMemory
from plans.search.balancing import Balancing, TaskRates, share_samples
from plans.search.genome import Genome
from plans.search.layouts import LayerSplit, TaskLayout
from plans.spec.job import Job
from plans.workflow import RlTask, TaskKind

#: Balanced tasks kept (each some kilobytes at 1,024 GPUs).
CACHE_ENTRIES = 20_000


class Price(NamedTuple):
    """Rank of a candidate: cheaper first, and among the infeasible ones the less overfull first."""

    score_s: float
    """Seconds per iteration; infinite when infeasible."""
    overflow_bytes: float
    """Bytes lacking, summed over GPUs."""

    @property
    def is_feasible(self) -> bool:
        """Whether the candidate can run."""
        return math.isfinite(self.score_s)


UNPLACEABLE = Price(math.inf, math.inf)


class Pricer:
    """Balances and prices candidates of one problem; counts what it prices."""

    def __init__(self, evaluator: PlanEvaluator, balancing: Balancing) -> None:
        """Keep the evaluator; its caches and this object's do not change any result."""
        self.evaluator = evaluator
        self.balancing = balancing
        self.count = 0
        job: Job = evaluator.job
        self._total = job.num_samples
        self._rates = {task: TaskRates(evaluator, task, self._micro_batch(task)) for task in evaluator.tasks}
        self._generation_memory = TaskMemory(job, RlTask.ACTOR_GENERATION)
        self._usable = np.minimum(
            job.generation.memory_fraction * evaluator.view.memory_bytes,
            evaluator.view.memory_bytes - evaluator.view.reserve_bytes,
        )
        self._cap = job.generation.max_num_seqs
        self._even = lru_cache(maxsize=CACHE_ENTRIES)(self._even_uncached)
        self._balanced = lru_cache(maxsize=CACHE_ENTRIES)(self._balanced_uncached)

    def price(self, genome: Genome) -> Price:
        """Return the rank of a candidate."""
        self.count += 1
        plan = self.compact(genome)
        if plan is None:
            return UNPLACEABLE
        evaluation = self.evaluator.evaluate(plan)
        return Price(evaluation.score_s, evaluation.overflow_bytes)

    def evaluation(self, genome: Genome) -> Evaluation | None:
        """Return the whole price of a candidate; None where a task cannot be placed at all."""
        plan = self.compact(genome)
        return None if plan is None else self.evaluator.evaluate(plan)

    def compact(self, genome: Genome) -> CompactPlan | None:
        """Return the balanced placement of a candidate; None where a task has fewer layers or samples than parts."""
        tasks: dict[RlTask, CompactTask] = {}
        for task, layout in genome.layouts.items():
            if task.kind is not TaskKind.GENERATION:
                balanced = self._balanced(task, layout)
                if balanced is None:
                    return None
                tasks[task] = balanced
        generation = self._generation(genome, tasks)
        if generation is None:
            return None
        tasks[RlTask.ACTOR_GENERATION] = generation
        return CompactPlan(groups=genome.grouping, tasks=tasks)

    def task_s(self, task: RlTask, layout: TaskLayout, held_bytes: float = 0.0) -> tuple[float, float]:
        """Return (seconds, largest share of a GPU's memory that stays resident) of one task alone.

        Args:
            task: the task.
            layout: its layout.
            held_bytes: bytes of other models assumed on each GPU (they take room from the key/value cache).
        """
        if task.kind is TaskKind.GENERATION:
            return self._generation_s(layout, held_bytes)
        placement = self._balanced(task, layout)
        if placement is None:
            return math.inf, math.inf
        share = self._rates[task].resident_share(placement.gpus, placement.layers)
        return self.evaluator.task_cost(task, placement).total_s, share

    def _generation_s(self, layout: TaskLayout, held_bytes: float) -> tuple[float, float]:
        even = self._even(RlTask.ACTOR_GENERATION, layout, None)
        if even is None:
            return math.inf, math.inf
        model = self.evaluator.memory.task_memory(RlTask.ACTOR_GENERATION, even).model
        resident = np.zeros(self.evaluator.view.num_gpus)
        resident[even.flat] = model + held_bytes
        rooms = self._rooms(even, resident)
        if min(rooms) < 1:
            return math.inf, math.inf
        placement = self._with_samples(RlTask.ACTOR_GENERATION, even, rooms)
        batches = tuple(max(1, min(room, samples)) for room, samples in zip(rooms, placement.samples, strict=True))
        cost = self.evaluator.task_cost(RlTask.ACTOR_GENERATION, placement, batches)
        return cost.total_s, self._rates[RlTask.ACTOR_GENERATION].resident_share(even.gpus, even.layers)

    def _generation(self, genome: Genome, tasks: Mapping[RlTask, CompactTask]) -> CompactTask | None:
        layout = genome.layouts[RlTask.ACTOR_GENERATION]
        training = tasks[RlTask.ACTOR_TRAINING]
        in_place = layout.gpus == genome.layouts[RlTask.ACTOR_TRAINING].gpus and (layout.pp, layout.tp) == (
            training.pp,
            training.tp,
        )
        even = self._even(RlTask.ACTOR_GENERATION, layout, training.layers if in_place else None)
        if even is None or not self.balancing.generation_samples:
            return even
        group = genome.grouping[genome.group_of(RlTask.ACTOR_GENERATION)]
        members = {task: even if task is RlTask.ACTOR_GENERATION else tasks[task] for task in group}
        rooms = self.evaluator.memory.group_memory(group, members).decode_rooms
        return self._with_samples(RlTask.ACTOR_GENERATION, even, rooms)

    def _rooms(self, placement: CompactTask, resident: np.ndarray) -> tuple[int, ...]:
        """Return how many sequences each replica can decode together beside what is resident."""
        per_stage = np.array([self._generation_memory.cache_bytes(layers, placement.tp) for layers in placement.layers])
        free = (self._usable[placement.gpus] - resident[placement.gpus]) / per_stage[None, :, None]
        return tuple(min(self._cap, max(0, int(room))) for room in np.floor(free.min(axis=(1, 2))).tolist())

    def _with_samples(self, task: RlTask, even: CompactTask, rooms: tuple[int, ...]) -> CompactTask:
        """Return the placement with samples in proportion to the replicas' speed."""
        if len(even.samples) == 1:
            return even
        batches = [max(1, room) for room in rooms]
        units = self._rates[task].replica_unit_s(even.gpus, even.layers, batches)
        unit_s = self._exact_units(task, even, batches) if units is None else units.tolist()
        if max(unit_s) <= min(unit_s) * (1.0 + 1e-9) or not math.isfinite(max(unit_s)):
            return even
        samples = share_samples(self._total, unit_s)
        return CompactTask(even.gpus, even.layers, samples, even.micro_batch_size)

    def _exact_units(self, task: RlTask, even: CompactTask, batches: Sequence[int]) -> list[float]:
        """Return seconds per sample of each replica by the evaluator (any placement, slower)."""
        return [
            max(1e-12, self.evaluator.replica_s(task, even, index, samples, batches[index] if batches else 1)) / samples
            for index, samples in enumerate(even.samples)
        ]

    def _micro_batch(self, task: RlTask) -> int:
        """Return the micro-batch size of a task: the job's for training, 1 elsewhere."""
        return self.evaluator.job.training.micro_batch_size if task.kind is TaskKind.TRAINING else 1

    def _even_uncached(self, task: RlTask, layout: TaskLayout, layers: tuple[int, ...] | None) -> CompactTask | None:
        """Return the placement with equal samples; `layers` overrides the split."""
        if layout.dp > self._total:
            return None
        grid = np.array(layout.gpus, dtype=np.int32).reshape(layout.dp, layout.pp, layout.tp)
        if layers is None:
            layers = self._layers(task, layout, grid)
        if layers is None:
            return None
        base, extra = divmod(self._total, layout.dp)
        samples = tuple(base + (1 if index < extra else 0) for index in range(layout.dp))
        return CompactTask(grid, layers, samples, self._micro_batch(task))

    def _layers(self, task: RlTask, layout: TaskLayout, grid: np.ndarray) -> tuple[int, ...] | None:
        split = layout.split if self.balancing.layers else LayerSplit.EVEN
        return self._rates[task].layers(grid, split)

    def _balanced_uncached(self, task: RlTask, layout: TaskLayout) -> CompactTask | None:
        even = self._even(task, layout, None)
        if even is None or not self.balancing.other_samples:
            return even
        return self._with_samples(task, even, ())
