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


class TaskletBytes(NamedTuple):
    """Bytes of one task's tasklets, in the order of `CompactTask.flat`."""

    model: FloatArray
    working: FloatArray


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
        self._tasks: BoundedCache[Hashable, TaskletBytes] = BoundedCache(entries_for(view.num_gpus))
        self._groups: BoundedCache[Hashable, GroupMemory] = BoundedCache(entries_for(view.num_gpus))

    def task_memory(self, task: RlTask, placement: CompactTask) -> TaskletBytes:
        """Return resident and working bytes of each tasklet, in the order of `placement.flat` (cache left out)."""
        key = (task, placement.key)
        memory = self._tasks.get(key)
        if memory is None:
            memory = self._build_memory(task, placement)
            self._tasks.put(key, memory)
        return memory

    def _build_memory(self, task: RlTask, placement: CompactTask) -> TaskletBytes:
        model = self._models[task]
        dp, pp, tp, mbs = placement.dp, placement.pp, placement.tp, placement.micro_batch_size
        resident = [
            model.model_bytes(layers, is_first=j == 0, is_last=j == pp - 1, tp=tp, dp=dp)
            for j, layers in enumerate(placement.layers)
        ]
        model_bytes = np.tile(np.repeat(np.array(resident), tp), dp)
        if task.kind is TaskKind.GENERATION:
            return TaskletBytes(model_bytes, np.zeros(dp * pp * tp))
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
        return TaskletBytes(model_bytes, working)

    def group_memory(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> GroupMemory:
        """Return the outcome of one group."""
        key = tuple((task, tasks[task].key) for task in group)
        outcome = self._groups.get(key)
        if outcome is None:
            outcome = self._build_group(group, tasks)
            self._groups.put(key, outcome)
        return outcome

    def _build_group(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> GroupMemory:
        resident, working = self._dense(group, tasks)
        batches: tuple[int, ...] = ()
        rooms: tuple[int, ...] = ()
        overflow = 0.0
        if RlTask.ACTOR_GENERATION in group:
            batches, rooms, overflow = self._place_cache(tasks[RlTask.ACTOR_GENERATION], resident, working)
        excess = resident + working - self._capacity
        if excess.max() > 0:
            overflow += float(excess[excess > 0].sum())
        return GroupMemory(overflow, batches, rooms)

    def group_need(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> tuple[float, list[int]]:
        """Return the bytes that a group needs in all (one sequence per replica at least), and its GPUs."""
        resident, working = self._dense(group, tasks)
        if RlTask.ACTOR_GENERATION in group:
            self._place_cache(tasks[RlTask.ACTOR_GENERATION], resident, working)
        gpus = sorted({int(gpu) for task in group for gpu in tasks[task].flat})
        return float((resident + working)[gpus].sum()), gpus

    def _dense(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> tuple[FloatArray, FloatArray]:
        """Return resident and working bytes by GPU [N], the key/value cache left out."""
        resident = np.zeros(self._num_gpus)
        working = np.zeros(self._num_gpus)
        for task in group:
            placement = tasks[task]
            memory = self.task_memory(task, placement)
            owner = WEIGHT_OWNERS.get(task)
            if owner is None or owner not in group or tasks[owner].grid_key != placement.grid_key:
                resident[placement.flat] += memory.model
            working[placement.flat] = np.maximum(working[placement.flat], memory.working)
        return resident, working

    def _place_cache(
        self, placement: CompactTask, resident: FloatArray, working: FloatArray
    ) -> tuple[tuple[int, ...], tuple[int, ...], float]:
        """Return decode batches, rooms and the bytes lacking for one sequence; add the cache to the working bytes."""
        model = self._models[RlTask.ACTOR_GENERATION]
        per_stage = np.array([model.cache_bytes(layers, placement.tp) for layers in placement.layers])
        free = self._usable[placement.gpus] - resident[placement.gpus]
        fits = np.floor(free / per_stage[None, :, None]).min(axis=(1, 2)).tolist()
        rooms = tuple(max(0, min(self._cap, int(room))) for room in fits)
        batches = tuple(max(1, min(room, samples)) for room, samples in zip(rooms, placement.samples, strict=True))
        flat = np.repeat(np.outer(batches, per_stage).reshape(-1), placement.tp)
        working[placement.flat] = np.maximum(working[placement.flat], flat)
        lacking = 0.0
        if min(rooms) < 1:
            lacking = float(np.maximum(0.0, per_stage[None, :, None] - free).sum())
        return batches, rooms, lacking
