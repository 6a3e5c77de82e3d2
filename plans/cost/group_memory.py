"""Memory of groups of tasks on compact placements, for searches: the numbers of `plans.cost.ledger`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from plans.cost.compact import CompactTask, packed
from plans.spec.cluster import ClusterView, FloatArray
from plans.spec.job import Job
from plans.workflow import RlTask, workflow_of


class GroupMemory(NamedTuple):
    """Outcome of one group."""

    overflow_bytes: float
    """Bytes lacking, summed over GPUs."""
    decode_batches: tuple[int, ...]
    """Decode batch per replica of generation; empty without generation."""
    decode_rooms: tuple[int, ...]
    """Most sequences that fit together per replica of generation; empty without generation."""
    need_bytes: float
    """Bytes that its GPUs need in all, one sequence per replica at least."""


class MemoryPricer:
    """Memory of groups of tasks on one cluster."""

    def __init__(self, view: ClusterView, job: Job) -> None:
        """Build the constants."""
        # Machine code is loaded when somebody searches, not when the package is imported.
        from plans.cost.compiled.build import build_memory
        from plans.cost.compiled.doors import group_overflow
        from plans.cost.compiled.words import words_of

        self._tasks = workflow_of(job).tasks
        self.tables = build_memory(view, job)
        self._words, self._overflow = words_of(self.tables), group_overflow

    def group_memory(self, group: tuple[RlTask, ...], tasks: Mapping[RlTask, CompactTask]) -> GroupMemory:
        """Return the outcome of one group."""
        plan = packed(self._tasks, (group,), tasks)
        generates = RlTask.ACTOR_GENERATION in group
        dp = tasks[RlTask.ACTOR_GENERATION].dp if generates else 0
        rooms, batches = np.zeros(dp, dtype=np.int64), np.zeros(dp, dtype=np.int64)
        resident, working = self._zeros(), self._zeros()
        overflow = self._overflow(
            self._words, plan.shape, plan.gpus, plan.layers, plan.samples, 0, resident, working, rooms, batches
        )
        return GroupMemory(
            overflow, tuple(batches.tolist()), tuple(rooms.tolist()), float(resident.sum() + working.sum())
        )

    def _zeros(self) -> FloatArray:
        return np.zeros(len(self.tables.machine_of))
