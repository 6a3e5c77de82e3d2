"""Memory of every GPU under a placement, and the decode batches that fit beside the models (constraint C3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plans.cost.task_cost import ReplicaPlacement, StagePlacement
from plans.memory import WEIGHT_OWNERS, TaskMemory, decode_batch_of, is_spread, usable_bytes
from plans.spec.cluster import ClusterView
from plans.spec.job import Job, Training
from plans.units import bytes_to_gb
from plans.workflow import RlTask, TaskKind

Placement = Mapping[RlTask, tuple[ReplicaPlacement, ...]]


@dataclass(slots=True)
class GpuBytes:
    """Bytes on one GPU."""

    model_bytes: float = 0.0
    """Resident: weights, gradients and optimiser states of all its tasklets."""
    working_bytes: float = 0.0
    """Largest working set of one of its tasklets."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Decode batch of one generation replica."""

    used: int
    """What is priced: what was asked for or fits, at most the replica's samples, at least 1."""
    fits: int
    """What the memory of its GPUs allows; 0 = not even one sequence."""
    asked: int | None
    """What the plan asks for."""


class MemoryLedger:
    """Bytes per GPU of a placement."""

    def __init__(self, view: ClusterView, job: Job, placement: Placement) -> None:
        """Add up the tasklets of every task, the key/value cache left out."""
        self.view = view
        self.job = job
        self.gpus: dict[int, GpuBytes] = {}
        for task in sorted(placement, key=list(RlTask).index):
            self._add_task(task, placement[task], in_place=uses_weights_in_place(job.training, placement, task))

    def _add_task(self, task: RlTask, replicas: Sequence[ReplicaPlacement], *, in_place: bool) -> None:
        memory = TaskMemory(self.job, task)
        for replica in replicas:
            for j, stage in enumerate(replica.stages):
                resident = 0.0 if in_place else self._resident(memory, replica, j, len(replicas))
                working = self._working(memory, replica, j, len(replicas))
                for gpu in stage.gpus:
                    entry = self.gpus.setdefault(gpu, GpuBytes())
                    entry.model_bytes += resident
                    entry.working_bytes = max(entry.working_bytes, working)

    @staticmethod
    def _resident(memory: TaskMemory, replica: ReplicaPlacement, j: int, dp: int) -> float:
        stage = replica.stages[j]
        is_last = j == len(replica.stages) - 1
        return memory.model_bytes(stage.layers, is_first=j == 0, is_last=is_last, tp=len(stage.gpus), dp=dp)

    @staticmethod
    def _working(memory: TaskMemory, replica: ReplicaPlacement, j: int, dp: int) -> float:
        if memory.task.kind is TaskKind.GENERATION:
            return 0.0
        stage = replica.stages[j]
        return memory.working_bytes(
            stage.layers,
            stage=j,
            num_stages=len(replica.stages),
            tp=len(stage.gpus),
            dp=dp,
            micro_batch_size=replica.micro_batch_size,
            micro_batches=replica.micro_batches,
        )

    def place_decode_batches(
        self, replicas: Sequence[ReplicaPlacement], asked: Sequence[int | None]
    ) -> tuple[tuple[ReplicaPlacement, ...], tuple[DecodeBatch, ...]]:
        """Set the decode batch of each generation replica and charge its key/value cache.

        dbs = min(cap, floor((u * memory - resident) / cache bytes per sequence)), least over the replica's GPUs.
        """
        memory = TaskMemory(self.job, RlTask.ACTOR_GENERATION)
        placed, batches = [], []
        for replica, wish in zip(replicas, asked, strict=True):
            fits = min(self._fits(memory, stage, gpu) for stage in replica.stages for gpu in stage.gpus)
            # A replica never decodes more sequences together than it has.
            used = max(1, min(fits if wish is None else wish, replica.samples))
            batches.append(DecodeBatch(used=used, fits=fits, asked=wish))
            placed.append(replace(replica, decode_batch=used))
            for stage in replica.stages:
                cache = used * memory.cache_bytes(stage.layers, len(stage.gpus))
                for gpu in stage.gpus:
                    self.gpus[gpu].working_bytes = max(self.gpus[gpu].working_bytes, cache)
        return tuple(placed), tuple(batches)

    def _fits(self, memory: TaskMemory, stage: StagePlacement, gpu: int) -> int:
        view, generation = self.view, self.job.generation
        usable = usable_bytes(float(view.memory_bytes[gpu]), float(view.reserve_bytes[gpu]), generation.memory_fraction)
        free = usable - self.gpus[gpu].model_bytes
        return decode_batch_of(free, memory.cache_bytes(stage.layers, len(stage.gpus)), generation.max_num_seqs)

    def overflow_bytes(self, gpu: int) -> float:
        """Return how many bytes a GPU lacks; 0 when it has enough."""
        entry = self.gpus[gpu]
        need = entry.model_bytes + entry.working_bytes + float(self.view.reserve_bytes[gpu])
        return max(0.0, need - float(self.view.memory_bytes[gpu]))

    def violations(self) -> list[str]:
        """Return one sentence for each GPU that breaks C3."""
        return [self._sentence(gpu) for gpu in sorted(self.gpus) if self.overflow_bytes(gpu) > 0]

    def _sentence(self, gpu: int) -> str:
        entry, view = self.gpus[gpu], self.view
        parts = (entry.model_bytes, entry.working_bytes, float(view.reserve_bytes[gpu]))
        model, working, reserve = (bytes_to_gb(part) for part in parts)
        return (
            f"{view.gpu_ids[gpu]} needs {model + working + reserve:.2f} GB (models {model:.2f}, working {working:.2f}, "
            f"reserve {reserve:.2f}) and has {bytes_to_gb(float(view.memory_bytes[gpu])):.2f} GB"
        )


def uses_weights_in_place(training: Training, placement: Placement, task: RlTask) -> bool:
    """Tell whether a task uses a training task's weights: same degrees, GPUs and layers in every replica, all whole."""
    owner = WEIGHT_OWNERS.get(task)
    if owner is None or owner not in placement or is_spread(training, len(placement[owner])):
        return False
    return [replica.stages for replica in placement[task]] == [replica.stages for replica in placement[owner]]


def batch_violations(batches: Sequence[DecodeBatch]) -> list[str]:
    """Return one sentence for each generation replica whose decode batch does not fit."""
    sentences = []
    for index, batch in enumerate(batches):
        if batch.fits < 1:
            sentences.append(f"actor_generation replica {index} has no memory for one full-length sequence")
        elif batch.asked is not None and batch.asked > batch.fits:
            sentences.append(
                f"actor_generation replica {index} asks for a decode batch of {batch.asked}, but {batch.fits} fit"
            )
    return sentences
