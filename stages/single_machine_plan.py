"""Placement on one machine: every device works for every task, so there is nothing to search."""

from __future__ import annotations

from plans.cost import CostModel, price
from plans.errors import MemoryInfeasibleError, TooFewGpusError
from plans.plan import PipelineStage, Plan, Replica, TaskGroup, TaskPlan, check_plan
from plans.search.limits import NO_LIMITS, Limits, TaskLimit
from plans.spec.cluster import Cluster, Machine
from plans.spec.job import Job, Mode
from plans.spec.llm import LlmShape
from plans.workflow import RlTask, TaskKind, shape_of, workflow_of

METHOD = "single-machine"
"""Name of the method in the plan document."""

CPU = "cpu"
"""GPU type whose devices are cores: a replica's `tp` is its number of threads (docs/adr/0004)."""

_TRAINING_BYTES_PER_PARAMETER = 16
"""Mixed-precision Adam: weights, gradients, master weights and two moments (hetrl.md 5)."""


def plan_on_machine(cluster: Cluster, job: Job, machine: Machine, model: CostModel, limits: Limits = NO_LIMITS) -> Plan:
    """Return the plan that places every task of a job on one machine; equal arguments give an equal plan.

    Args:
        cluster: The cluster of the machine; may hold others, which get nothing to do.
        job: The planner's part of the job.
        machine: The machine.
        model: Cost model of the prediction.
        limits: What the engines can run.

    Raises:
        TooFewGpusError: async mode needs two GPUs on the machine.
        MemoryInfeasibleError: the model does not fit on the machine.
    """
    gpus = machine.gpu_ids
    workflow = workflow_of(job)
    if job.mode is Mode.ASYNC:
        if len(gpus) < 2:
            raise TooFewGpusError(
                f"cluster {cluster.name}: machine {machine.name} has 1 GPU, but in async mode generation shares no GPU "
                "with training, so 2 are needed on one machine; use mode: sync or a machine with more GPUs."
            )
        half = len(gpus) // 2
        parts = {RlTask.ACTOR_GENERATION: gpus[:half]}
        groups: tuple[TaskGroup, ...] = (
            TaskGroup(tasks=(RlTask.ACTOR_GENERATION,), gpus=gpus[:half]),
            TaskGroup(tasks=tuple(t for t in workflow.tasks if t is not RlTask.ACTOR_GENERATION), gpus=gpus[half:]),
        )
    else:
        half = 0
        parts = {}
        groups = (TaskGroup(tasks=workflow.tasks, gpus=gpus),)
    tasks = {
        task: _place(cluster, job, machine, task, parts.get(task, gpus[half:]), limits.of(task))
        for task in workflow.tasks
    }
    plan = Plan(method=METHOD, cluster=cluster.fingerprint, job=job.fingerprint, groups=groups, tasks=tasks)
    check_plan(plan, cluster, job, source_name="the chosen plan")
    predicted = price(cluster, job, plan, model).to_document()
    return plan.model_copy(update={"predicted": predicted})


def _place(
    cluster: Cluster, job: Job, machine: Machine, task: RlTask, gpus: tuple[str, ...], limit: TaskLimit | None
) -> TaskPlan:
    shape = shape_of(job, task)
    if machine.gpu == CPU:
        tp = max(n for n in range(1, len(gpus) + 1) if limit is None or limit.allows_tp(n, (CPU,)))
    else:
        tp = _smallest_tp(cluster, job, machine, task, shape, len(gpus), limit)
    dp = max(1, min(len(gpus) // tp, job.num_samples))
    is_generation = task.kind is TaskKind.GENERATION
    replicas = tuple(
        Replica(
            samples=job.num_samples // dp + (index < job.num_samples % dp),
            micro_batch_size=job.training.micro_batch_size,
            decode_batch=job.generation.max_num_seqs if is_generation else None,
            stages=(PipelineStage(layers=shape.layers, gpus=gpus[index * tp : (index + 1) * tp]),),
        )
        for index in range(dp)
    )
    return TaskPlan(dp=dp, pp=1, tp=tp, replicas=replicas)


def _smallest_tp(
    cluster: Cluster,
    job: Job,
    machine: Machine,
    task: RlTask,
    shape: LlmShape,
    num_gpus: int,
    limit: TaskLimit | None,
) -> int:
    """Return the least tensor-parallel degree at which the model's resident bytes fit.

    Only generation may have more than 1, and training where its engine splits tensors.
    """
    is_generation = task.kind is TaskKind.GENERATION
    is_training = task.kind is TaskKind.TRAINING
    resident = shape.parameters * (_TRAINING_BYTES_PER_PARAMETER if is_training else job.weight_bytes_per_parameter)
    gpu = cluster.gpu_type(machine.gpu)
    room = (gpu.memory_bytes - gpu.reserve_bytes) * (job.generation.memory_fraction if is_generation else 1.0)
    is_split = is_generation or (limit is not None and limit.tp_divides is not None)
    for tp in range(1, (num_gpus if is_split else 1) + 1):
        if limit is not None and limit.tp_divides is not None and not limit.allows_tp(tp, (machine.gpu,)):
            continue
        if num_gpus % tp == 0 and shape.kv_heads % tp == 0 and resident / tp <= room:
            return tp
    raise MemoryInfeasibleError(
        f"cluster {cluster.name}: {task.value} needs {resident / 1e9:.1f} GB, but {num_gpus} GPUs of {machine.name} "
        f"have {room / 1e9:.1f} GB each; use a smaller model or a machine with more memory."
    )
