"""Fast pricing of compact plans for searches: the same numbers as `price`, with everything kept that recurs.

What is kept: per task and placement its cost and memory; per group and contents its memory outcome; per stage (a
tuple of GPUs) its slowest chip and its ring. Changing one group of a plan re-prices that group's tasks only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from plans.cost.collectives import LinkTimes
from plans.cost.compact import CompactPlan, CompactTask
from plans.cost.iteration import PhaseTimes, combine
from plans.cost.model import CostModel
from plans.cost.price import link_times
from plans.cost.terms import DecodeTerms, TaskTerms, build_terms
from plans.cost.transfer import WeightLine, transfer_s
from plans.memory import TaskMemory
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.workflow import RlTask, TaskKind, shape_of, workflow_of

#: Entries per cache after which it is emptied: bounds memory in long searches.
CACHE_LIMIT = 50_000
FloatArray = NDArray[np.float64]
ValueT = TypeVar("ValueT")


class FastTaskCost(NamedTuple):
    """Seconds of one task; see `plans.cost.task_cost.TaskCost`."""

    total_s: float
    comp_s: float
    hbm_s: float
    tp_s: float
    pp_s: float
    dp_s: float
    bubble_s: float


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


class _Stage(NamedTuple):
    """What the formulas need of the GPUs of a stage."""

    flop_per_s: float
    hbm_bytes_per_s: float
    overhead_s: float
    machines: tuple[int, ...]
    places: frozenset[int]
    only_machine: int
    """The machine of all its GPUs, or -1."""
    ring_s: float
    """One all-reduce of a micro-batch over the best ring."""


class _Memory(NamedTuple):
    """Bytes of one task's tasklets, in the order of `CompactTask.flat`."""

    model: FloatArray
    working: FloatArray


class _GroupMemory(NamedTuple):
    """Outcome of one group."""

    overflow_bytes: float
    decode_batches: tuple[int, ...]
    decode_rooms: tuple[int, ...]


class PlanEvaluator:
    """Prices compact plans of one cluster, job and model. Not safe to share between threads."""

    def __init__(self, cluster: Cluster, job: Job, model: CostModel) -> None:
        self.cluster = cluster
        self.job = job
        self.model = model
        self.view = cluster.view
        self.tasks = workflow_of(job).tasks
        self.links: LinkTimes = link_times(self.view, model)
        self.terms = {task: build_terms(self.view, job, task, model) for task in self.tasks}
        self.evaluations = 0
        actor = shape_of(job, RlTask.ACTOR_TRAINING)
        self._line = WeightLine.of(actor, job.weight_bytes_per_parameter)
        self._memory_models = {task: TaskMemory(job, task) for task in self.tasks}
        self._machine_of: list[int] = self.view.machine_of.tolist()
        self._capacity = self.view.memory_bytes - self.view.reserve_bytes
        self._usable = np.minimum(job.generation.memory_fraction * self.view.memory_bytes, self._capacity)
        self._costs: dict[Hashable, FastTaskCost] = {}
        self._memories: dict[Hashable, _Memory] = {}
        self._groups: dict[Hashable, _GroupMemory] = {}
        self._transfers: dict[Hashable, float] = {}
        self._stages: dict[tuple[RlTask, int], dict[tuple[int, ...], _Stage]] = {}

    def evaluate(self, plan: CompactPlan) -> Evaluation:
        """Return the price of a plan; its tasks must be exactly those of the job."""
        self.evaluations += 1
        tasks = plan.tasks
        generation, training = tasks[RlTask.ACTOR_GENERATION], tasks[RlTask.ACTOR_TRAINING]
        shared = self.shares_weights(plan)
        overflow = 0.0
        batches: tuple[int, ...] = ()
        rooms: tuple[int, ...] = ()
        group_of: dict[RlTask, int] = {}
        for index, group in enumerate(plan.groups):
            outcome = self._group_memory(group, tasks, shared=shared)
            overflow += outcome.overflow_bytes
            for task in group:
                group_of[task] = index
            if RlTask.ACTOR_GENERATION in group:
                batches, rooms = outcome.decode_batches, outcome.decode_rooms
        task_s = {}
        for task in self.tasks:
            decode = batches if task is RlTask.ACTOR_GENERATION else ()
            task_s[task] = self.task_cost(task, tasks[task], decode).total_s
        moved_s = self._transfer_s(training, generation)
        phases = combine(self.job.mode, task_s, group_of, moved_s, self.model.eta)
        return Evaluation(phases.iteration_s, overflow, phases, task_s, batches, rooms)

    @staticmethod
    def shares_weights(plan: CompactPlan) -> bool:
        """Tell whether generation uses the training weights in place (same GPUs, degrees and layers)."""
        generation, training = plan.tasks[RlTask.ACTOR_GENERATION], plan.tasks[RlTask.ACTOR_TRAINING]
        return generation.layers == training.layers and (
            generation.gpus is training.gpus or np.array_equal(generation.gpus, training.gpus)
        )

    def task_cost(self, task: RlTask, placement: CompactTask, decode_batches: tuple[int, ...] = ()) -> FastTaskCost:
        """Return the cost of one task on a placement; generation needs its decode batches."""
        key = (task, placement.key, decode_batches)
        cost = self._costs.get(key)
        if cost is None:
            cost = self._price(task, placement, decode_batches)
            _keep(self._costs, key, cost)
        return cost

    def replica_s(self, task: RlTask, placement: CompactTask, index: int, samples: int, decode_batch: int = 1) -> float:
        """Return the seconds of one replica with so many samples, without the gradient all-reduce."""
        table = self._stage_table(task, placement.micro_batch_size)
        return self._replica(self.terms[task], table, placement, index, samples, decode_batch)[0]

    def stage_totals(
        self, task: RlTask, placement: CompactTask, index: int, decode_batch: int = 1
    ) -> tuple[float, ...]:
        """Return the seconds of each stage of one replica."""
        table = self._stage_table(task, placement.micro_batch_size)
        samples = placement.samples[index]
        return tuple(self._replica(self.terms[task], table, placement, index, samples, decode_batch)[6])

    def _price(self, task: RlTask, placement: CompactTask, decode_batches: tuple[int, ...]) -> FastTaskCost:
        terms = self.terms[task]
        table = self._stage_table(task, placement.micro_batch_size)
        total = comp = hbm = tp = pp = bubble = 0.0
        for i, samples in enumerate(placement.samples):
            batch = decode_batches[i] if decode_batches else 1
            slowest, c, h, t, p, b, _ = self._replica(terms, table, placement, i, samples, batch)
            total = slowest if slowest > total else total
            comp = c if c > comp else comp
            hbm = h if h > hbm else hbm
            tp = t if t > tp else tp
            pp = p if p > pp else pp
            bubble = b if b > bubble else bubble
        dp = self._gradient_s(terms, table, placement) if terms.is_training else 0.0
        return FastTaskCost(total + dp, comp, hbm, tp, pp, dp, bubble)

    def _replica(
        self,
        terms: TaskTerms,
        table: dict[tuple[int, ...], _Stage],
        placement: CompactTask,
        index: int,
        num_samples: int,
        batch: int,
    ) -> tuple[float, float, float, float, float, float, list[float]]:
        """Return (slowest stage + bubble, the largest comp, hbm, tp, pp, the bubble, stage totals) of a replica."""
        mbs, layers = placement.micro_batch_size, placement.layers
        gpus = placement.stages[index]
        last = len(gpus) - 1
        tp_degree = len(gpus[0])
        micro_batches = -(-num_samples // mbs)
        samples = micro_batches * mbs if terms.pads_micro_batches else num_samples
        work = terms.passes * samples
        tp_factor = terms.tp_count * micro_batches
        pp_factor = terms.pp_count * micro_batches
        pp_bytes = terms.activation_bytes * mbs
        totals: list[float] = []
        comp_max = hbm_max = tp_max = pp_max = flow = 0.0
        decode = terms.decode
        steps = decode.steps(float(samples), batch) if decode is not None else 0.0
        stage = table.get(gpus[0]) or self._make_stage(terms, table, gpus[0], mbs)
        for j, num_layers in enumerate(layers):
            is_last = j == last
            flop = num_layers * terms.layer_flop + (terms.head_flop if is_last else 0.0)
            comp = work * flop / (stage.flop_per_s * tp_degree)
            tp = tp_factor * num_layers * stage.ring_s
            pp = hbm = 0.0
            following = stage
            if not is_last:
                following = table.get(gpus[j + 1]) or self._make_stage(terms, table, gpus[j + 1], mbs)
                pp = pp_factor * self._pair_s(stage, following, pp_bytes)
            if j:
                flow += comp + tp + pp
            if decode is not None:
                hbm = steps * _decode_step_s(decode, stage, num_layers, batch, tp_degree, is_last=is_last)
                if decode.tp_count:
                    tp += steps * decode.tp_count * num_layers * self._token_ring_s(decode, stage, batch, tp_degree)
                    if not is_last:
                        pp += steps * self._pair_s(stage, following, batch * decode.token_bytes)
            total = comp + tp + pp + hbm
            totals.append(total)
            comp_max = comp if comp > comp_max else comp_max
            hbm_max = hbm if hbm > hbm_max else hbm_max
            tp_max = tp if tp > tp_max else tp_max
            pp_max = pp if pp > pp_max else pp_max
            stage = following
        bubble = terms.updates * flow / micro_batches if terms.has_bubble else 0.0
        return max(totals) + bubble, comp_max, hbm_max, tp_max, pp_max, bubble, totals

    def _pair_s(self, first: _Stage, second: _Stage, num_bytes: float) -> float:
        if first.only_machine >= 0 and second.only_machine >= 0:
            return self.links.edge_s(first.only_machine, second.only_machine, num_bytes)
        return self.links.pair_s(first.places, second.places, num_bytes)

    def _token_ring_s(self, decode: DecodeTerms, stage: _Stage, batch: int, tp: int) -> float:
        if tp == 1:
            return 0.0
        return self.links.ring_s(stage.machines, batch * decode.token_bytes * (2.0 * (tp - 1) / tp))

    def _stage_table(self, task: RlTask, micro_batch_size: int) -> dict[tuple[int, ...], _Stage]:
        table = self._stages.setdefault((task, micro_batch_size), {})
        if len(table) > CACHE_LIMIT:
            table.clear()
        return table

    def _make_stage(
        self, terms: TaskTerms, table: dict[tuple[int, ...], _Stage], gpus: tuple[int, ...], mbs: int
    ) -> _Stage:
        index = list(gpus)
        machines = tuple(sorted(self._machine_of[gpu] for gpu in gpus))
        tp = len(gpus)
        stage = _Stage(
            flop_per_s=float(terms.compute_flop_per_s[index].min()),
            hbm_bytes_per_s=float(terms.hbm_bytes_per_s[index].min()),
            overhead_s=0.0 if terms.decode is None else float(terms.decode.layer_overhead_s[index].max()),
            machines=machines,
            places=frozenset(machines),
            only_machine=machines[0] if machines[0] == machines[-1] else -1,
            ring_s=0.0 if tp == 1 else self.links.ring_s(machines, terms.tp_bytes(mbs, tp)),
        )
        table[gpus] = stage
        return stage

    def _gradient_s(self, terms: TaskTerms, table: dict[tuple[int, ...], _Stage], placement: CompactTask) -> float:
        if placement.dp == 1:
            return 0.0
        slowest, last = 0.0, placement.pp - 1
        for j, num_layers in enumerate(placement.layers):
            weights = terms.stage_gradient_bytes(num_layers, is_first=j == 0, is_last=j == last)
            num_bytes = terms.dp_bytes(weights, placement.dp, placement.tp)
            column = [replica[j] for replica in placement.stages]
            for ring in self._rings_of(table, column):
                slowest = max(slowest, self.links.ring_s(ring, num_bytes))
        return terms.updates * slowest

    def _rings_of(
        self, table: dict[tuple[int, ...], _Stage], column: Sequence[tuple[int, ...]]
    ) -> set[tuple[int, ...]]:
        """Return the distinct machine multisets of a stage's gradient rings, one ring per TP rank."""
        only = [table[gpus].only_machine for gpus in column]
        if min(only) >= 0:
            only.sort()
            return {tuple(only)}
        return {tuple(sorted([self._machine_of[gpu] for gpu in rank])) for rank in zip(*column, strict=True)}

    def _transfer_s(self, training: CompactTask, generation: CompactTask) -> float:
        key = (training.gpus.shape, training.gpus.tobytes(), training.layers,
               generation.gpus.shape, generation.gpus.tobytes(), generation.layers)  # fmt: skip
        seconds = self._transfers.get(key)
        if seconds is None:
            from_slots = [list(zip(training.layers, stages, strict=True)) for stages in training.stages]
            to_slots = [list(zip(generation.layers, stages, strict=True)) for stages in generation.stages]
            seconds = transfer_s(self._line, self.view, self.links, self.model, from_slots, to_slots)
            _keep(self._transfers, key, seconds)
        return seconds

    def task_memory(self, task: RlTask, placement: CompactTask) -> _Memory:
        """Return resident and working bytes of each tasklet, in the order of `placement.flat` (cache left out)."""
        key = (task, placement.key)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._build_memory(task, placement)
            _keep(self._memories, key, memory)
        return memory

    def _build_memory(self, task: RlTask, placement: CompactTask) -> _Memory:
        model = self._memory_models[task]
        dp, pp, tp, mbs = placement.dp, placement.pp, placement.tp, placement.micro_batch_size
        resident = [
            model.model_bytes(layers, is_first=j == 0, is_last=j == pp - 1, tp=tp, dp=dp)
            for j, layers in enumerate(placement.layers)
        ]
        model_bytes = np.tile(np.repeat(np.array(resident), tp), dp)
        if task.kind is TaskKind.GENERATION:
            return _Memory(model_bytes, np.zeros(dp * pp * tp))
        by_count: dict[int, list[float]] = {}
        rows = []
        for samples in placement.samples:
            count = -(-samples // mbs)
            if count not in by_count:
                by_count[count] = [
                    model.working_bytes(layers, stage=j, num_stages=pp, tp=tp, micro_batch_size=mbs,
                                        micro_batches=count)
                    for j, layers in enumerate(placement.layers)
                ]  # fmt: skip
            rows.append(by_count[count])
        working = np.repeat(np.array(rows).reshape(-1), tp)
        return _Memory(model_bytes, working)

    def _group_memory(
        self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask], *, shared: bool
    ) -> _GroupMemory:
        shared = shared and RlTask.ACTOR_GENERATION in group
        key = (shared, tuple((task, tasks[task].key) for task in group))
        outcome = self._groups.get(key)
        if outcome is None:
            outcome = self._build_group(group, tasks, shared=shared)
            _keep(self._groups, key, outcome)
        return outcome

    def _build_group(
        self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask], *, shared: bool
    ) -> _GroupMemory:
        resident = np.zeros(self.view.num_gpus)
        working = np.zeros(self.view.num_gpus)
        for task in group:
            placement = tasks[task]
            memory = self.task_memory(task, placement)
            if not (shared and task is RlTask.ACTOR_GENERATION):
                resident[placement.flat] += memory.model
            working[placement.flat] = np.maximum(working[placement.flat], memory.working)
        batches: tuple[int, ...] = ()
        rooms: tuple[int, ...] = ()
        overflow = 0.0
        if RlTask.ACTOR_GENERATION in group:
            batches, rooms, overflow = self._place_cache(tasks[RlTask.ACTOR_GENERATION], resident, working)
        excess = resident + working - self._capacity
        if excess.max() > 0:
            overflow += float(excess[excess > 0].sum())
        return _GroupMemory(overflow, batches, rooms)

    def _place_cache(
        self, placement: CompactTask, resident: FloatArray, working: FloatArray
    ) -> tuple[tuple[int, ...], tuple[int, ...], float]:
        """Return decode batches, rooms and the bytes lacking for one sequence; add the cache to the working bytes."""
        model = self._memory_models[RlTask.ACTOR_GENERATION]
        cap = self.job.generation.max_num_seqs
        per_stage = np.array([model.cache_bytes(layers, placement.tp) for layers in placement.layers])
        free = self._usable[placement.gpus] - resident[placement.gpus]
        fits = np.floor(free / per_stage[None, :, None]).min(axis=(1, 2)).tolist()
        rooms = tuple(max(0, min(cap, int(room))) for room in fits)
        batches = tuple(max(1, min(room, samples)) for room, samples in zip(rooms, placement.samples, strict=True))
        flat = np.repeat(np.outer(batches, per_stage).reshape(-1), placement.tp)
        working[placement.flat] = np.maximum(working[placement.flat], flat)
        lacking = 0.0
        if min(rooms) < 1:
            lacking = float(np.maximum(0.0, per_stage[None, :, None] - free).sum())
        return batches, rooms, lacking


def _decode_step_s(decode: DecodeTerms, stage: _Stage, num_layers: int, batch: int, tp: int, *, is_last: bool) -> float:
    weights = (num_layers * decode.layer_bytes + (decode.head_bytes if is_last else 0.0)) / tp
    cache = batch * num_layers * decode.cache_bytes / min(tp, decode.kv_heads)
    memory_s = (weights + cache) / stage.hbm_bytes_per_s
    work = batch * (num_layers * decode.layer_flop + (decode.head_flop if is_last else 0.0)) / tp
    compute_s = work / stage.flop_per_s
    return (memory_s if memory_s > compute_s else compute_s) + num_layers * stage.overhead_s


def _keep(cache: dict[Hashable, ValueT], key: Hashable, value: ValueT) -> None:
    """Store a value; empty the cache first when it is full."""
    if len(cache) >= CACHE_LIMIT:
        cache.clear()
    cache[key] = value
