"""Fast pricing of compact plans for searches: the same numbers as `price`, by machine code.

A plan is packed into a few arrays and priced by one call (`plans.cost.compiled`); a plan of 64 GPUs takes some tens of
microseconds, so nothing of it is kept for the next one. Rings that need a search are the exception: the compiled code
asks for them, `LinkTimes` solves them, and they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from plans.cost.collectives import LinkTimes
from plans.cost.compact import CompactPlan, CompactTask, PackedPlan, packed
from plans.cost.compiled.tables import RINGS_ASKED, RINGS_KEPT
from plans.cost.group_memory import MemoryPricer
from plans.cost.iteration import PhaseTimes
from plans.cost.model import CostModel
from plans.cost.price import link_times
from plans.cost.terms import build_terms
from plans.spec.cluster import Cluster, FloatArray, IntArray
from plans.spec.job import Job
from plans.workflow import RlTask, workflow_of

ResultT = TypeVar("ResultT")

#: Strategies of load balancing where nothing is balanced.
_NO_STRATEGIES = np.zeros(3, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Price of a compact plan."""

    iteration_s: float
    """Seconds per iteration by the model, whether or not memory suffices; infinite over a forbidden link."""
    overflow_bytes: float
    """Bytes lacking, summed over GPUs, with one sequence's cache counted where not even that fits."""
    phases: PhaseTimes
    """Seconds of the phases."""
    task_s: Mapping[RlTask, float]
    """Seconds per task."""
    decode_batches: tuple[int, ...]
    """Decode batch per generation replica."""
    decode_rooms: tuple[int, ...]
    """Most sequences that fit together, per generation replica, capped by max_num_seqs; 0 = none."""

    @property
    def feasible(self) -> bool:
        """Whether memory and links allow the plan."""
        return self.overflow_bytes <= 0.0 and math.isfinite(self.iteration_s)

    @property
    def score_s(self) -> float:
        """`iteration_s` when feasible, infinite otherwise: what a search minimises."""
        return self.iteration_s if self.feasible else math.inf


class PlanEvaluator:
    """Prices compact plans of one cluster, job and model. Not safe to share between threads."""

    def __init__(self, cluster: Cluster, job: Job, model: CostModel) -> None:
        # Machine code is loaded when somebody searches, not when the package is imported.
        from plans.cost.compiled import build, doors, whole_plan
        from plans.cost.compiled.words import words_of

        self.cluster, self.job, self.model = cluster, job, model
        self.view = cluster.view
        self.tasks = workflow_of(job).tasks
        self.links: LinkTimes = link_times(self.view, model)
        self.terms = {task: build_terms(self.view, job, task, model) for task in self.tasks}
        self.memory = MemoryPricer(self.view, job)
        self._tables = build.build_tables(self.view, job, model, self.links, self.terms, self.memory.tables)
        self._words = words_of(self._tables)
        self._asked = self._tables.rings.num_asked
        self._rings_kept = 0
        self._row = {task: index for index, task in enumerate(self.tasks)}
        self._generation = self._row[RlTask.ACTOR_GENERATION]
        self._doors, self._build, self._words_of, self._code = doors, build, words_of, whole_plan
        # What a call writes, large enough for any plan.
        most, num_tasks = self.view.num_gpus, len(self.tasks)
        self._layers, self._samples, self._rooms, self._batches = (
            np.empty(count, dtype=np.int64) for count in (most * num_tasks, most * num_tasks, most, most)
        )
        self._seconds = np.empty(whole_plan.TASKS_S + num_tasks)

    @property
    def words(self) -> IntArray:
        """The constants, for compiled code that searches call themselves; see `solve_rings`."""
        return self._words

    def evaluate(self, plan: CompactPlan) -> Evaluation:
        """Return the price of a plan; its tasks must be exactly those of the job."""
        arrays = packed(self.tasks, plan.groups, plan.tasks)
        dp = plan.tasks[RlTask.ACTOR_GENERATION].dp
        overflow = self._price(self._code.PRICE, _NO_STRATEGIES, arrays)
        iteration, generation, inference, training, transfer, *each = self._seconds.tolist()
        phases = PhaseTimes(generation, inference, training, transfer, iteration)
        task_s = dict(zip(self.tasks, each, strict=True))
        rooms, batches = (tuple(counts[:dp].tolist()) for counts in (self._rooms, self._batches))
        return Evaluation(iteration, overflow, phases, task_s, batches, rooms)

    def balance(self, strategies: IntArray, plan: PackedPlan) -> bool:
        """Balance a plan given without layers and samples; write both, return whether every task can be placed.

        Args:
            strategies: which of the strategies of load balancing are used [3] (`whole_plan`).
            plan: shape and GPUs; its layers and samples are written.
        """
        return math.isfinite(self._price(self._code.BALANCE, strategies, plan))

    def score_candidate(self, strategies: IntArray, shape: IntArray, gpus: IntArray) -> tuple[float, float]:
        """Balance and price a candidate: return `score_s` and `overflow_bytes`, both infinite where it can't be placed.

        Args:
            strategies: which of the strategies of load balancing are used [3].
            shape: a row per task, in the order of `tasks` [T, NUM_SHAPE].
            gpus: GPUs of all tasks, one after the other.
        """
        overflow = self._price(self._code.SCORE, strategies, PackedPlan(shape, gpus, self._layers, self._samples))
        return (math.inf if overflow > 0.0 else float(self._seconds[0])), overflow

    def _price(self, wanted: int, strategies: IntArray, plan: PackedPlan) -> float:
        """Return the bytes that a plan lacks; what else is wanted is in `plan` and in the arrays kept for it."""
        self._asked[0] = 0
        while True:
            overflow: float = self._doors.price_plan(
                self._words, strategies, wanted, *plan, self._rooms, self._batches, self._seconds
            )
            if not self._asked[0]:
                return overflow
            self.solve_rings()

    def price_alone(
        self, strategies: IntArray, task: RlTask, row: IntArray, gpus: IntArray, held_bytes: float
    ) -> tuple[float, float]:
        """Balance and price one task alone: return its seconds, and the largest share of a GPU that its model fills.

        Args:
            strategies: which of the strategies of load balancing are used [3].
            task: the task.
            row: its row of a shape [NUM_SHAPE].
            gpus: its GPUs [dp * pp * tp].
            held_bytes: bytes of other models assumed on each GPU (they take room from the key/value cache).
        """
        self._asked[0] = 0
        found = self._doors.price_alone(self._words, strategies, self._row[task], row, gpus, held_bytes)
        while self._asked[0]:
            self.solve_rings()
            found = self._doors.price_alone(self._words, strategies, self._row[task], row, gpus, held_bytes)
        return found

    def solve_rings(self) -> None:
        """Solve the rings that compiled code asked for, and keep them; it must be asked again then."""
        rings, count = self._tables.rings, min(int(self._asked[0]), RINGS_ASKED)
        if self._rings_kept + count > RINGS_KEPT // 2:
            rings.keys[:] = 0
            self._rings_kept = 0
        edges = np.empty((count, 2))
        for index in range(count):
            counts = rings.asked_counts[index]
            machines = np.repeat(np.arange(len(counts)), counts)
            edges[index] = self.links.slowest_edge(tuple(machines.tolist()), float(rings.asked_bytes[index]))
        self._doors.keep_rings(self._words, edges)
        self._rings_kept += count
        self._asked[0] = 0

    def task_s(self, task: RlTask, placement: CompactTask, decode_batches: Sequence[int] = ()) -> float:
        """Return the seconds of one task on a placement; generation needs its decode batches."""
        if decode_batches:
            self._know_tails(max(decode_batches))
        machines, layers = self._machines(placement), np.array(placement.layers, dtype=np.int64)
        samples, batches = (np.array(values, dtype=np.int64) for values in (placement.samples, decode_batches))
        found: float = self._settled(
            lambda: self._doors.task_s(
                self._words, self._row[task], machines, layers, placement.tp, placement.micro_batch_size, samples,
                batches,
            )
        )  # fmt: skip
        return found

    def replica_s(self, task: RlTask, placement: CompactTask, index: int, samples: int, decode_batch: int = 1) -> float:
        """Return the seconds of one replica with so many samples, without the gradient all-reduce."""
        totals = np.empty(placement.pp)
        fill = self._replica(task, placement, index, samples, decode_batch, totals)
        return float(totals.max()) + fill

    def stage_totals(
        self, task: RlTask, placement: CompactTask, index: int, decode_batch: int = 1
    ) -> tuple[float, ...]:
        """Return the seconds of each stage of one replica."""
        totals = np.empty(placement.pp)
        self._replica(task, placement, index, placement.samples[index], decode_batch, totals)
        return tuple(totals.tolist())

    def transfer_s(self, training: CompactTask, generation: CompactTask) -> float:
        """Return C_reshard or C_sync between two placements."""
        tasks = {RlTask.ACTOR_TRAINING: training, RlTask.ACTOR_GENERATION: generation}
        rows = packed(tuple(tasks), (tuple(tasks),), tasks).shape
        source, target = ((task.flat.astype(np.int64), np.array(task.layers)) for task in (training, generation))
        found: float = self._settled(lambda: self._doors.transfer_s(self._words, rows[0], *source, rows[1], *target))
        return found

    def split_layers(self, task: RlTask, placement: CompactTask, split: int) -> tuple[int, ...] | None:
        """Return layers per stage [pp] of a placement, whose own layers and samples do not matter.

        None where no split fits the layers or the memory.

        Args:
            task: the task.
            placement: where it is.
            split: how layers are shared out (SPLIT_SPEED, SPLIT_MEMORY or SPLIT_EVEN of the tables).
        """
        machines, layers = self._machines(placement), np.empty(placement.pp, dtype=np.int64)
        is_split = self._settled(
            lambda: self._doors.split_layers(
                self._words, self._row[task], machines, placement.dp, placement.pp, placement.tp,
                placement.micro_batch_size, split, layers,
            )
        )  # fmt: skip
        return tuple(layers.tolist()) if is_split else None

    def resident_share(self, task: RlTask, placement: CompactTask) -> float:
        """Return the largest share of a GPU's memory that its shard of the task's model fills."""
        machines, layers = self._machines(placement), np.array(placement.layers, dtype=np.int64)
        found: float = self._doors.resident_share(
            self._words, self._row[task], machines, placement.dp, layers, placement.tp
        )
        return found

    def _replica(
        self, task: RlTask, placement: CompactTask, index: int, samples: int, batch: int, totals: FloatArray
    ) -> float:
        """Write the seconds of a replica's stages [pp]; return its pipeline fill."""
        self._know_tails(batch)
        start, mbs = index * placement.pp * placement.tp, placement.micro_batch_size
        machines = self._machines(placement)[start : start + placement.pp * placement.tp]
        layers = np.array(placement.layers, dtype=np.int64)
        found: float = self._settled(
            lambda: self._doors.stage_totals(
                self._words, self._row[task], machines, layers, placement.tp, mbs, samples, batch, totals
            )
        )
        return found

    def _machines(self, placement: CompactTask) -> IntArray:
        return self._tables.machine_of.take(placement.flat)

    def _know_tails(self, batch: int) -> None:
        """Work out the tails of larger decode batches than a plan of the job can have."""
        decode = self.terms[RlTask.ACTOR_GENERATION].decode
        if decode is not None and batch >= len(self._tables.tails):
            self._tables = self._tables._replace(tails=self._build.tails_up_to(decode, batch))
            self._words = self._words_of(self._tables)

    def _settled(self, call: Callable[[], ResultT]) -> ResultT:
        """Return the answer of compiled code once all rings are known that it asks for."""
        self._asked[0] = 0
        found = call()
        while self._asked[0]:
            self.solve_rings()
            found = call()
        return found
