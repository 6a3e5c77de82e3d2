"""Fast memory outcome of a group of tasks on compact placements: the numbers of `plans.cost.ledger`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np

from plans.cost.cache import BoundedCache, entries_for
from plans.cost.compact import CompactTask
from plans.memory import WEIGHT_OWNERS, TaskMemory
from plans.spec.cluster import ClusterView, FloatArray
from plans.spec.job import Job
from plans.workflow import RlTask, TaskKind, workflow_of


class TaskBytes(NamedTuple):
    """Bytes of one task's tasklets by GPU [N]; 0 on GPUs that it does not use."""

    resident: FloatArray
    """Weights, and gradients and states when training."""
    working: FloatArray
    """Working set; of generation without its key/value cache, which depends on what else is resident."""


class GroupMemory(NamedTuple):
    """Outcome of one group."""

    overflow_bytes: float
    decode_batches: tuple[int, ...]
    decode_rooms: tuple[int, ...]


class FastMemory:
    """Memory of groups of tasks on one cluster."""

    def __init__(self, view: ClusterView, job: Job) -> None:
        self._num_gpus = view.num_gpus
        self._cap = job.generation.max_num_seqs
        self._models = {task: TaskMemory(job, task) for task in workflow_of(job).tasks}
        self._capacity = view.memory_bytes - view.reserve_bytes
        self._usable = np.minimum(job.generation.memory_fraction * view.memory_bytes, self._capacity)
        entries = entries_for(view.num_gpus)
        self._stages: BoundedCache[Hashable, FloatArray] = BoundedCache(entries)
        self._tasks: dict[RlTask, BoundedCache[Hashable, TaskBytes]] = {
            task: BoundedCache(entries // len(self._models)) for task in self._models
        }
        self._resident: BoundedCache[Hashable, FloatArray] = BoundedCache(entries // len(self._models))
        self._rooms: BoundedCache[Hashable, tuple[int, ...]] = BoundedCache(entries)
        self._groups: BoundedCache[Hashable, GroupMemory] = BoundedCache(entries)

    def group_memory(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> GroupMemory:
        """Return the outcome of one group."""
        key = tuple([(task, tasks[task].key) for task in group])
        outcome = self._groups.get(key)
        if outcome is None:
            outcome = self._build_group(group, tasks)
            self._groups.put(key, outcome)
        return outcome

    def decode_rooms(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> tuple[int, ...]:
        """Return the most sequences that fit together per replica of generation, a task of the group; 0 = none."""
        key = tuple([(task, tasks[task].grid_key) for task in group])
        rooms = self._rooms.get(key)
        if rooms is None:
            placement = tasks[RlTask.ACTOR_GENERATION]
            free = (self._usable - self._group_resident(group, tasks)).take(placement.gpus)
            fits = np.floor(free / self.cache_bytes(placement.layers, placement.tp)[:, None]).min(axis=(1, 2))
            rooms = tuple(np.clip(fits, 0, self._cap).astype(np.int64).tolist())
            self._rooms.put(key, rooms)
        return rooms

    def stage_bytes(self, task: RlTask, layers: tuple[int, ...], tp: int, dp: int) -> FloatArray:
        """Return resident bytes of a tasklet by stage [pp]."""
        key = (task, layers, tp, dp)
        found = self._stages.get(key)
        if found is None:
            model, last = self._models[task], len(layers) - 1
            parameters = np.array(layers) * float(model.shape.layer_parameters)
            for stage in {0, last}:
                parameters[stage] = model.stage_parameters(layers[stage], is_first=stage == 0, is_last=stage == last)
            found = model.parameter_bytes(dp) * (parameters / tp)
            self._stages.put(key, found)
        return found

    def cache_bytes(self, layers: tuple[int, ...], tp: int) -> FloatArray:
        """Return key/value bytes of one sequence by stage [pp]."""
        key = (layers, tp)
        found = self._stages.get(key)
        if found is None:
            model = self._models[RlTask.ACTOR_GENERATION]
            found = np.array([model.cache_bytes(count, tp) for count in layers])
            self._stages.put(key, found)
        return found

    def group_need(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> tuple[float, list[int]]:
        """Return the bytes that a group needs in all (one sequence per replica at least), and its GPUs."""
        need = self._group_resident(group, tasks) + self._group_working(group, tasks)
        gpus = sorted({int(gpu) for task in group for gpu in tasks[task].flat})
        return float(need[gpus].sum()), gpus

    def _build_group(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> GroupMemory:
        resident = self._group_resident(group, tasks)
        working = self._group_working(group, tasks)
        batches: tuple[int, ...] = ()
        rooms: tuple[int, ...] = ()
        overflow = 0.0
        if RlTask.ACTOR_GENERATION in group:
            placement = tasks[RlTask.ACTOR_GENERATION]
            rooms = self.decode_rooms(group, tasks)
            batches = _batches(rooms, placement)
            if min(rooms) < 1:
                lacking = (
                    self.cache_bytes(placement.layers, placement.tp)[:, None]
                    - (self._usable - resident)[placement.gpus]
                )
                overflow += float(np.maximum(0.0, lacking).sum())
        excess = resident + working - self._capacity
        if excess.max() > 0:
            overflow += float(excess[excess > 0].sum())
        return GroupMemory(overflow, batches, rooms)

    def _group_resident(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> FloatArray:
        """Return resident bytes by GPU [N]; weights used in place count once."""
        key = tuple([(task, tasks[task].grid_key) for task in group])
        found = self._resident.get(key)
        if found is None:
            found = np.zeros(self._num_gpus)
            for task in group:
                owner = WEIGHT_OWNERS.get(task)
                if owner is None or owner not in group or tasks[owner].grid_key != tasks[task].grid_key:
                    found += self._task_bytes(task, tasks[task]).resident
            self._resident.put(key, found)
        return found

    def _group_working(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> FloatArray:
        """Return working bytes by GPU [N], the key/value cache included."""
        working = np.zeros(self._num_gpus)
        for task in group:
            if task is RlTask.ACTOR_GENERATION:
                placement = tasks[task]
                batches = np.array(_batches(self.decode_rooms(group, tasks), placement), dtype=np.float64)
                cache = np.zeros(self._num_gpus)
                cache[placement.gpus] = (batches[:, None] * self.cache_bytes(placement.layers, placement.tp))[
                    :, :, None
                ]
                np.maximum(working, cache, out=working)
            else:
                np.maximum(working, self._task_bytes(task, tasks[task]).working, out=working)
        return working

    def _task_bytes(self, task: RlTask, placement: CompactTask) -> TaskBytes:
        cache = self._tasks[task]
        found = cache.get(placement.key)
        if found is None:
            resident, working = np.zeros(self._num_gpus), np.zeros(self._num_gpus)
            per_stage = self.stage_bytes(task, placement.layers, placement.tp, placement.dp)
            resident[placement.gpus] = per_stage[:, None]
            if task is not RlTask.ACTOR_GENERATION:
                working[placement.gpus] = self._working(task, placement)
            found = TaskBytes(resident, working)
            cache.put(placement.key, found)
        return found

    def _working(self, task: RlTask, placement: CompactTask) -> FloatArray:
        """Return working bytes of the tasklets, to be spread over [dp, pp, tp]."""
        pp, mbs = placement.pp, placement.micro_batch_size
        counts = [min(pp, -(-samples // mbs)) for samples in placement.samples]
        if task.kind is TaskKind.INFERENCE:
            return self._stage_working(task, placement, 1)[:, None]
        if min(counts) == max(counts):
            return self._stage_working(task, placement, counts[0])[:, None]
        return np.array([self._stage_working(task, placement, count) for count in counts])[:, :, None]

    def _stage_working(self, task: RlTask, placement: CompactTask, micro_batches: int) -> FloatArray:
        """Return working bytes by stage [pp]; only the first `pp` micro-batches matter."""
        layers, tp, mbs = placement.layers, placement.tp, placement.micro_batch_size
        # Only training keeps something per layer.
        shape = layers if task.kind is TaskKind.TRAINING else len(layers)
        key = (task, shape, tp, mbs, micro_batches, "working")
        found = self._stages.get(key)
        if found is None:
            model, pp = self._models[task], len(layers)
            found = np.array(
                [
                    model.working_bytes(count, stage=j, num_stages=pp, tp=tp, micro_batch_size=mbs,
                                        micro_batches=micro_batches)
                    for j, count in enumerate(layers)
                ]
            )  # fmt: skip
            self._stages.put(key, found)
        return found


def _batches(rooms: tuple[int, ...], placement: CompactTask) -> tuple[int, ...]:
    return tuple([max(1, min(room, samples)) for room, samples in zip(rooms, placement.samples, strict=True)])
