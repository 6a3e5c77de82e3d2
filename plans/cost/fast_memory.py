"""Fast memory outcome of a group of tasks on compact placements: the numbers of `plans.cost.ledger`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np

from plans.cost.cache import BoundedCache, entries_for
from plans.cost.compact import CompactTask
from plans.memory import WEIGHT_OWNERS, TaskMemory
from plans.spec.cluster import ClusterView, FloatArray
from plans.spec.job import Job
from plans.workflow import RlTask, TaskKind, workflow_of


class GroupMemory(NamedTuple):
    """Outcome of one group."""

    overflow_bytes: float
    decode_batches: tuple[int, ...]
    decode_rooms: tuple[int, ...]


class _Held(NamedTuple):
    """What a group holds whatever the samples of generation, by GPU [N], and the room that it leaves for decoding."""

    resident: FloatArray
    """Bytes of weights, gradients and states; weights used in place count once."""
    working: FloatArray
    """Largest working set, key/value caches left out."""
    rooms: tuple[int, ...]
    """Most sequences that fit together per replica of generation [dp]; empty without generation."""


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
        self._tasks: BoundedCache[Hashable, FloatArray] = BoundedCache(entries)
        self._held: BoundedCache[Hashable, _Held] = BoundedCache(entries // len(self._models))
        self._groups: BoundedCache[Hashable, GroupMemory] = BoundedCache(entries)

    def group_memory(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> GroupMemory:
        """Return the outcome of one group."""
        key = (group, *[tasks[task] for task in group])
        outcome = self._groups.get(key)
        if outcome is None:
            outcome = self._build_group(group, tasks)
            self._groups.put(key, outcome)
        return outcome

    def decode_rooms(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> tuple[int, ...]:
        """Return the most sequences that fit together per replica of generation, a task of the group; 0 = none."""
        return self._held_by(group, tasks).rooms

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
        held = self._held_by(group, tasks)
        need = held.resident + self._with_cache(held, tasks)
        gpus = sorted({int(gpu) for task in group for gpu in tasks[task].flat})
        return float(need[gpus].sum()), gpus

    def _build_group(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> GroupMemory:
        held = self._held_by(group, tasks)
        rooms = held.rooms
        batches: tuple[int, ...] = ()
        overflow = 0.0
        if rooms:
            placement = tasks[RlTask.ACTOR_GENERATION]
            batches = _batches(rooms, placement)
            if min(rooms) < 1:
                each = np.tile(self._cache_by_tasklet(placement), placement.dp)
                lacking = each - (self._usable - held.resident).take(placement.flat)
                overflow += float(np.maximum(0.0, lacking).sum())
        excess = held.resident + self._with_cache(held, tasks) - self._capacity
        if np.maximum.reduce(excess) > 0:
            overflow += float(excess[excess > 0].sum())
        return GroupMemory(overflow, batches, rooms)

    def _with_cache(self, held: _Held, tasks: Mapping[RlTask, CompactTask]) -> FloatArray:
        """Return working bytes by GPU [N], the key/value cache included."""
        if not held.rooms:
            return held.working
        placement, cache = tasks[RlTask.ACTOR_GENERATION], np.zeros(self._num_gpus)
        batches = np.array(_batches(held.rooms, placement), dtype=np.float64)
        cache[placement.flat] = (batches[:, None] * self._cache_by_tasklet(placement)).ravel()
        return np.maximum(held.working, cache)

    def _held_by(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> _Held:
        # The samples of generation only decide its batches, so its GPUs and layers are enough of it.
        placed = [tasks[task] if task is not RlTask.ACTOR_GENERATION else tasks[task].grid_key for task in group]
        key = (group, *placed)
        found = self._held.get(key)
        if found is None:
            found = self._make_held(group, tasks)
            self._held.put(key, found)
        return found

    def _make_held(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> _Held:
        each = np.array(
            [self._task_bytes(task, tasks[task], in_place=_is_in_place(task, group, tasks)) for task in group]
        )
        resident: FloatArray = np.add.reduce(each[:, 0])
        working: FloatArray = np.maximum.reduce(each[:, 1])
        if RlTask.ACTOR_GENERATION not in group:
            return _Held(resident, working, ())
        placement = tasks[RlTask.ACTOR_GENERATION]
        free = (self._usable - resident).take(placement.flat).reshape(placement.dp, -1)
        fits = np.minimum.reduce(free / self._cache_by_tasklet(placement), axis=1).tolist()
        return _Held(resident, working, tuple([max(0, min(self._cap, math.floor(most))) for most in fits]))

    def _task_bytes(self, task: RlTask, placement: CompactTask, *, in_place: bool) -> FloatArray:
        """Return resident and working bytes of a task's tasklets by GPU [2, N]; 0 on GPUs that it does not use."""
        is_generation = task is RlTask.ACTOR_GENERATION
        key = (task, placement.grid_key if is_generation else placement, in_place)
        found = self._tasks.get(key)
        if found is None:
            found = np.zeros((2, self._num_gpus))
            if not in_place:
                found[0, placement.flat] = self._resident_by_tasklet(task, placement)
            if not is_generation:
                found[1, placement.flat] = self._working_by_tasklet(task, placement)
            self._tasks.put(key, found)
        return found

    def _resident_by_tasklet(self, task: RlTask, placement: CompactTask) -> FloatArray:
        """Return resident bytes of each tasklet [dp * pp * tp]."""
        layers, tp, dp = placement.layers, placement.tp, placement.dp
        key = (task, layers, tp, dp, "resident")
        found = self._stages.get(key)
        if found is None:
            found = np.tile(np.repeat(self.stage_bytes(task, layers, tp, dp), tp), dp)
            self._stages.put(key, found)
        return found

    def _cache_by_tasklet(self, placement: CompactTask) -> FloatArray:
        """Return key/value bytes of one sequence on each tasklet of a replica [pp * tp]."""
        key = (placement.layers, placement.tp, "cache")
        found = self._stages.get(key)
        if found is None:
            found = np.repeat(self.cache_bytes(placement.layers, placement.tp), placement.tp)
            self._stages.put(key, found)
        return found

    def _working_by_tasklet(self, task: RlTask, placement: CompactTask) -> FloatArray:
        """Return working bytes of each tasklet [dp * pp * tp]; only the first `pp` micro-batches matter."""
        layers, tp, mbs = placement.layers, placement.tp, placement.micro_batch_size
        counts: tuple[int, ...] = (1,) * placement.dp
        if task.kind is TaskKind.TRAINING:
            pp = placement.pp
            is_full = min(placement.samples) > (pp - 1) * mbs
            counts = (pp,) * placement.dp if is_full else tuple([min(pp, -(-n // mbs)) for n in placement.samples])
        # Only training keeps something per layer.
        key = (task, layers if task.kind is TaskKind.TRAINING else len(layers), tp, mbs, counts)
        found = self._stages.get(key)
        if found is None:
            by_count = {count: self._stage_working(task, placement, count) for count in set(counts)}
            found = np.concatenate([by_count[count] for count in counts])
            self._stages.put(key, found)
        return found

    def _stage_working(self, task: RlTask, placement: CompactTask, micro_batches: int) -> FloatArray:
        """Return working bytes of each tasklet of a replica [pp * tp]."""
        model, pp, tp = self._models[task], placement.pp, placement.tp
        by_stage = [
            model.working_bytes(count, stage=j, num_stages=pp, tp=tp, micro_batch_size=placement.micro_batch_size,
                                micro_batches=micro_batches)
            for j, count in enumerate(placement.layers)
        ]  # fmt: skip
        return np.repeat(by_stage, tp)


def _is_in_place(task: RlTask, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> bool:
    """Tell whether a task uses the weights of a training task of its group: same GPUs, degrees and layers."""
    owner = WEIGHT_OWNERS.get(task)
    return owner is not None and owner in group and tasks[owner].grid_key == tasks[task].grid_key


def _batches(rooms: tuple[int, ...], placement: CompactTask) -> tuple[int, ...]:
    return tuple([max(1, min(room, samples)) for room, samples in zip(rooms, placement.samples, strict=True)])
