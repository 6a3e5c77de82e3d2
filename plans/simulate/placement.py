"""From a plan document to the stages, replicas and sample shares that the simulator executes."""

from __future__ import annotations

from collections.abc import Sequence

from plans.plan import Plan, Replica
from plans.simulate.physics import StagePlace
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.workflow import RlTask, shape_of


def stages_of(replica: Replica, cluster: Cluster, job: Job, task: RlTask) -> tuple[StagePlace, ...]:
    """Return the pipeline stages of a replica with GPU indices."""
    last = len(replica.stages) - 1
    return tuple(
        StagePlace(
            kind=task.kind,
            shape=shape_of(job, task),
            gpus=tuple(cluster.view.gpu_index[gpu] for gpu in stage.gpus),
            layers=stage.layers,
            is_first=index == 0,
            is_last=index == last,
            has_scalar_head=task.has_scalar_head,
            bytes_per_value=job.weight_bytes_per_parameter,
        )
        for index, stage in enumerate(replica.stages)
    )


def decode_batch_of(replica: Replica, stages: Sequence[StagePlace], cluster: Cluster, job: Job, plan: Plan) -> int:
    """Return the replica's decode batch: the plan's, or what fits in the memory that all tasks' weights leave free.

    Resident bytes are the stage weights of every task on a GPU, times 9 for a training task with Adam in mixed
    precision (18 bytes per parameter against 2; Megatron's accounting), times 4 in fp32. A cache is reserved for the
    longest sequences.
    """
    if replica.decode_batch is not None:
        return replica.decode_batch
    resident = _resident_bytes(cluster, job, plan)
    room = []
    for stage in stages:
        shape = stage.shape
        heads = max(1.0, shape.kv_heads / len(stage.gpus))
        per_sequence = job.lengths.total * stage.layers * 2 * heads * shape.head_dim * stage.bytes_per_value
        for gpu in stage.gpus:
            free = job.generation.memory_fraction * cluster.view.memory_bytes[gpu] - resident.get(gpu, 0.0)
            room.append(int(free // per_sequence))
    return max(1, min([job.generation.max_num_seqs, *room]))


def _resident_bytes(cluster: Cluster, job: Job, plan: Plan) -> dict[int, float]:
    resident: dict[int, float] = {}
    for task, placed in plan.tasks.items():
        factor = (9 if job.weight_bytes_per_parameter == 2 else 4) if task.kind.value == "training" else 1
        for replica in placed.replicas:
            for stage in stages_of(replica, cluster, job, task):
                for gpu in stage.gpus:
                    resident[gpu] = resident.get(gpu, 0.0) + factor * stage.weight_bytes / len(stage.gpus)
    return resident
