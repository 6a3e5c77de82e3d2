"""From the placements of both sides to a plan document; rollout replicas may differ in TP, stages and layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plans.cost.compact import CompactTask
from plans.plan import PipelineStage, Plan, Replica, TaskGroup, TaskPlan
from plans.search.areal_hex.rollout_plan import RolloutPlan
from plans.search.problem import Problem
from plans.workflow import RlTask

METHOD = "areal-hex"


def plan_document(problem: Problem, consumer: Mapping[RlTask, CompactTask], rollout: RolloutPlan) -> Plan:
    """Return the plan: generation in a group of its own, everything else in the other."""
    ids = problem.view.gpu_ids
    tasks = {RlTask.ACTOR_GENERATION: _generation(rollout, ids)}
    tasks |= {task: _uniform(placement, ids) for task, placement in consumer.items()}
    others = tuple(task for task in problem.workflow.tasks if task is not RlTask.ACTOR_GENERATION)
    groups = tuple(_group(members, tasks, problem) for members in ((RlTask.ACTOR_GENERATION,), others))
    return Plan(
        method=METHOD,
        cluster=problem.cluster.fingerprint,
        job=problem.job.fingerprint,
        groups=groups,
        tasks={task: tasks[task] for task in problem.workflow.tasks},
    )


def _group(members: tuple[RlTask, ...], tasks: Mapping[RlTask, TaskPlan], problem: Problem) -> TaskGroup:
    index = problem.view.gpu_index
    used = sorted({index[gpu] for task in members for gpu in tasks[task].gpus})
    return TaskGroup(tasks=members, gpus=tuple(problem.view.gpu_ids[gpu] for gpu in used))


def _generation(rollout: RolloutPlan, ids: Sequence[str]) -> TaskPlan:
    replicas = tuple(
        Replica(
            samples=replica.rollouts,
            decode_batch=replica.decode_batch,
            lengths=replica.lengths,
            stages=_stages(replica.configuration.layers, replica.stages, ids),
        )
        for replica in rollout.replicas
    )
    degrees = {(len(r.stages), len(r.stages[0].gpus)) for r in replicas}
    return TaskPlan(
        dp=len(replicas),
        pp=max(pp for pp, _ in degrees),
        tp=max(tp for _, tp in degrees),
        replicas=replicas,
        hetero_tp=len(degrees) > 1,
    )


def _uniform(task: CompactTask, ids: Sequence[str]) -> TaskPlan:
    replicas = tuple(
        Replica(
            samples=samples,
            micro_batch_size=task.micro_batch_size,
            stages=_stages(task.layers, stages, ids),
        )
        for samples, stages in zip(task.samples, task.stages, strict=True)
    )
    return TaskPlan(dp=task.dp, pp=task.pp, tp=task.tp, replicas=replicas)


def _stages(layers: Sequence[int], stages: Sequence[Sequence[int]], ids: Sequence[str]) -> tuple[PipelineStage, ...]:
    return tuple(
        PipelineStage(layers=count, gpus=tuple(ids[gpu] for gpu in gpus))
        for count, gpus in zip(layers, stages, strict=True)
    )
