"""Compact plans: arrays of GPU indices instead of documents, for searches and the fast evaluator.

Only plans whose tasks have uniform degrees and one layer split for all replicas have a compact form; others are
priced by `plans.cost.price`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plans.plan import PipelineStage, Plan, Replica, TaskGroup, TaskPlan
from plans.spec.cluster import Cluster, ClusterView, IntArray
from plans.spec.job import Job
from plans.workflow import RlTask

GpuGrid = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class CompactTask:
    """Placement of one task. Immutable: the array is made read-only; make a new object to change anything."""

    gpus: GpuGrid
    """GPU indices [dp, pp, tp]."""
    layers: tuple[int, ...]
    """Layers per pipeline stage [pp]."""
    samples: tuple[int, ...]
    """Samples per replica [dp]."""
    micro_batch_size: int = 1
    """Samples per micro-batch."""

    def __post_init__(self) -> None:
        """Make the array read-only, contiguous and of one type; nobody else can write to what `read_only_grid` made."""
        grid = np.ascontiguousarray(self.gpus, dtype=np.int32)
        base = grid if grid.base is None else grid.base
        if isinstance(base, np.ndarray) and not base.flags.writeable:
            return
        if grid.base is not None or grid is self.gpus:
            grid = grid.copy()
        grid.setflags(write=False)
        object.__setattr__(self, "gpus", grid)

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return int(self.gpus.shape[0])

    @property
    def pp(self) -> int:
        """Pipeline stages per replica."""
        return int(self.gpus.shape[1])

    @property
    def tp(self) -> int:
        """Shards per stage."""
        return int(self.gpus.shape[2])

    @cached_property
    def key(self) -> Hashable:
        """Identity by content, for caches."""
        return (self.grid_key, self.samples, self.micro_batch_size)

    @cached_property
    def grid_key(self) -> Hashable:
        """Identity of GPUs and layers, without samples."""
        return (self.gpus.shape, self.gpus.tobytes(), self.layers)

    @cached_property
    def stages(self) -> list[list[tuple[int, ...]]]:
        """GPU indices per replica and stage, as tuples."""
        return [[tuple(stage) for stage in replica] for replica in self.gpus.tolist()]

    @cached_property
    def flat(self) -> GpuGrid:
        """All GPU indices in replica, stage, rank order [dp * pp * tp]."""
        return self.gpus.reshape(-1)


@dataclass(frozen=True, eq=False)
class CompactPlan:
    """A placement of every task."""

    groups: tuple[tuple[RlTask, ...], ...]
    """Task grouping."""
    tasks: Mapping[RlTask, CompactTask]
    """Placement per task."""


class PackedPlan(NamedTuple):
    """A plan as arrays, for the compiled cost model; tasks in the order of the job."""

    shape: IntArray
    """A row per task (columns: `plans.cost.compiled.tables`)."""
    gpus: IntArray
    """GPUs of all tasks, one after the other, each replica by replica, stage by stage, shard by shard."""
    layers: IntArray
    """Layers per stage of all tasks."""
    samples: IntArray
    """Samples per replica of all tasks."""


def packed(
    order: Sequence[RlTask], groups: Sequence[Sequence[RlTask]], tasks: Mapping[RlTask, CompactTask]
) -> PackedPlan:
    """Return the arrays of a plan, or of some groups of it: tasks of no group have no GPUs.

    Args:
        order: tasks of the job.
        groups: task groupings.
        tasks: placement per task.
    """
    group_of = {task: index for index, group in enumerate(groups) for task in group}
    present = [(task, tasks[task]) for task in order if task in group_of]
    rows = {
        task: (held.dp, held.pp, held.tp, held.micro_batch_size, 0, group_of[task], *_NOT_PLACED)
        for task, held in present
    }
    return PackedPlan(
        np.array([rows.get(task, _NO_TASK) for task in order], dtype=np.int64),
        np.concatenate([held.flat for _, held in present]).astype(np.int64),
        np.array([count for _, held in present for count in held.layers], dtype=np.int64),
        np.array([count for _, held in present for count in held.samples], dtype=np.int64),
    )


#: Where things of a task begin, before the tasks are placed one after the other.
_NOT_PLACED = (0, 0, 0, 0)
#: Row of a task that is in no group.
_NO_TASK = (0, 0, 0, 1, 0, -1, *_NOT_PLACED)


def read_only_grid(gpus: Sequence[int], dp: int, pp: int, tp: int) -> GpuGrid:
    """Return GPU indices [dp, pp, tp], given replica by replica, stage by stage, shard by shard."""
    flat = np.array(gpus, dtype=np.int32)
    flat.setflags(write=False)
    return flat.reshape(dp, pp, tp)


def compact_of(plan: Plan, cluster: Cluster) -> CompactPlan:
    """Return the compact form of a plan; raises ValueError where it has none (uneven stages between replicas)."""
    return CompactPlan(
        groups=tuple(group.tasks for group in plan.groups),
        tasks={task: _compact_task(task, task_plan, cluster.view) for task, task_plan in plan.tasks.items()},
    )


def plan_of(
    compact: CompactPlan,
    cluster: Cluster,
    job: Job,
    *,
    method: str,
    group_gpus: Sequence[Sequence[int]] | None = None,
    decode_batches: Sequence[int] | None = None,
) -> Plan:
    """Return the plan document of a compact plan.

    Args:
        compact: the placement.
        cluster: where the GPU indices point to.
        job: the job planned for.
        method: search method to name in the document.
        group_gpus: GPU indices of each group; absent = those that its tasks use.
        decode_batches: decode batch per generation replica; absent = left to be derived from free memory.
    """
    ids = cluster.view.gpu_ids
    groups = []
    for index, tasks in enumerate(compact.groups):
        used = {int(gpu) for task in tasks for gpu in compact.tasks[task].flat}
        gpus = sorted(used if group_gpus is None else used | {int(gpu) for gpu in group_gpus[index]})
        groups.append(TaskGroup(tasks=tasks, gpus=tuple(ids[gpu] for gpu in gpus)))
    plans = {}
    for task in RlTask:
        if task in compact.tasks:
            batches = decode_batches if task is RlTask.ACTOR_GENERATION else None
            plans[task] = _task_plan(compact.tasks[task], ids, batches)
    return Plan(method=method, cluster=cluster.fingerprint, job=job.fingerprint, groups=tuple(groups), tasks=plans)


def _task_plan(task: CompactTask, ids: Sequence[str], decode_batches: Sequence[int] | None) -> TaskPlan:
    replicas = tuple(
        Replica(
            samples=task.samples[i],
            micro_batch_size=task.micro_batch_size,
            decode_batch=None if decode_batches is None else decode_batches[i],
            stages=tuple(
                PipelineStage(layers=layers, gpus=tuple(ids[gpu] for gpu in gpus))
                for layers, gpus in zip(task.layers, stages, strict=True)
            ),
        )
        for i, stages in enumerate(task.stages)
    )
    return TaskPlan(dp=task.dp, pp=task.pp, tp=task.tp, replicas=replicas)


def _compact_task(task: RlTask, plan: TaskPlan, view: ClusterView) -> CompactTask:
    splits = {tuple(stage.layers for stage in replica.stages) for replica in plan.replicas}
    sizes = {replica.micro_batch_size for replica in plan.replicas}
    if plan.hetero_tp or len(splits) != 1 or len(sizes) != 1:
        raise ValueError(f"{task.value} differs between replicas, so it has no compact form")
    grid = [[[view.gpu_index[gpu] for gpu in stage.gpus] for stage in replica.stages] for replica in plan.replicas]
    return CompactTask(
        gpus=np.array(grid, dtype=np.int32),
        layers=next(iter(splits)),
        samples=tuple(replica.samples for replica in plan.replicas),
        micro_batch_size=next(iter(sizes)),
    )
