"""What every search method needs to know of a cluster, a job and a cost model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plans.cost.evaluator import PlanEvaluator
from plans.cost.model import CostModel
from plans.memory import TaskMemory
from plans.search.limits import NO_LIMITS, Limits
from plans.search.machine_order import MachineOrder
from plans.spec.cluster import Cluster, ClusterView
from plans.spec.job import Job, Mode, Sharding
from plans.workflow import RlTask, TaskKind, Workflow, shape_of, workflow_of


@dataclass(frozen=True)
class Problem:
    """The input of a search, with derived values computed once."""

    cluster: Cluster
    """The cluster."""
    job: Job
    """The job."""
    model: CostModel
    """The cost model whose `iteration_s` is minimised."""
    limits: Limits = NO_LIMITS
    """What the engines cannot execute; such placements are not in the search space."""

    @property
    def view(self) -> ClusterView:
        """Arrays over the GPUs."""
        return self.cluster.view

    @cached_property
    def workflow(self) -> Workflow:
        """Tasks and their order."""
        return workflow_of(self.job)

    @cached_property
    def evaluator(self) -> PlanEvaluator:
        """The fast evaluator."""
        return PlanEvaluator(self.cluster, self.job, self.model)

    @cached_property
    def order(self) -> MachineOrder:
        """Order and distances of the machines."""
        return MachineOrder(self.view)

    @cached_property
    def machine_of(self) -> list[int]:
        """Machine of each GPU [N]; reading elements of a list is several times faster than of an array."""
        found: list[int] = self.view.machine_of.tolist()
        return found

    @cached_property
    def compute_flop_per_s(self) -> list[float]:
        """FLOP/s of each GPU [N], as a list."""
        found: list[float] = self.view.compute_flop_per_s.tolist()
        return found

    @cached_property
    def resident_bytes(self) -> dict[RlTask, float]:
        """Bytes that a task keeps resident when its model is cut perfectly evenly."""
        return {task: self._resident(task) for task in self.workflow.tasks}

    @cached_property
    def capacity_bytes(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Bytes that tasklets may use, by GPU [N]."""
        return self.view.memory_bytes - self.view.reserve_bytes

    @cached_property
    def largest_capacity_bytes(self) -> float:
        """Bytes that tasklets may use on the GPU with most of them."""
        return float(self.capacity_bytes.max())

    @cached_property
    def work(self) -> dict[RlTask, float]:
        """Rough seconds of a task on one mean GPU, for proportional shares: FLOPs, and weight reads of decoding."""
        return {task: self._work(task) for task in self.workflow.tasks}

    @property
    def least_groups(self) -> int:
        """Groups that every grouping has at least: generation is apart in async mode."""
        return 2 if self.workflow.mode is Mode.ASYNC else 1

    def least_gpus(self, tasks: Sequence[RlTask]) -> int:
        """Return how many GPUs hold a group's models at the very least: the largest GPUs, perfect cuts.

        Generation beside actor training may use its weights in place. More than the cluster has (N + 1) when even
        all GPUs do not suffice.
        """
        in_place = RlTask.ACTOR_GENERATION if RlTask.ACTOR_TRAINING in tasks else None
        needed = sum(self.resident_bytes[task] for task in tasks if task is not in_place)
        return bisect_left(self._largest_bytes, needed) + 1

    @cached_property
    def _largest_bytes(self) -> list[float]:
        """Bytes that tasklets may use on the largest GPU, on the two largest ones, and so on [N]."""
        found: list[float] = np.cumsum(np.sort(self.capacity_bytes)[::-1]).tolist()
        return found

    def least_shards(self, task: RlTask) -> int:
        """Return the smallest pp * tp at which a shard of a task's model can fit the largest GPU."""
        return max(1, int(np.ceil(self.resident_bytes[task] / self.largest_capacity_bytes)))

    def _resident(self, task: RlTask) -> float:
        memory = TaskMemory(self.job, task)
        layers = memory.shape.layers
        training = self.job.training
        shares = training.distributed_optimizer or training.sharding is Sharding.FULL
        shards = self.view.num_gpus if shares else 1
        return memory.model_bytes(layers, is_first=True, is_last=True, tp=1, dp=shards)

    def _work(self, task: RlTask) -> float:
        shape, lengths = shape_of(self.job, task), self.job.lengths
        tokens = lengths.prompt if task.kind is TaskKind.GENERATION else lengths.total
        passes = 4.0 if task.kind is TaskKind.TRAINING else 1.0
        flop = passes * 2.0 * shape.parameters * tokens * self.job.num_samples
        seconds = flop / float(self.view.compute_flop_per_s.mean())
        if task.kind is TaskKind.GENERATION:
            waves = self.job.num_samples / min(64, self.job.generation.max_num_seqs)
            read = waves * lengths.response * 2.0 * shape.parameters
            seconds += read / float(self.view.hbm_bytes_per_s.mean())
        return seconds
