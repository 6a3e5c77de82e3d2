"""Plans whose policy is trained by several machines together."""

from __future__ import annotations

from collections.abc import Sequence

from plans.plan import PipelineStage, Plan, Replica, TaskGroup, TaskPlan, check_plan
from plans.spec.cluster import Cluster
from plans.workflow import RlTask
from stages.engine_limits import engine_limits
from stages.measured_rates import model_of
from stages.single_machine_plan import plan_on_machine
from stages.spec.job import TrainingJob


def pipeline_over(cluster: Cluster, job: TrainingJob, machines: Sequence[str]) -> Plan:
    """Return a plan that trains in one pipeline, a stage on each machine, and does all else on the first machine."""
    layers = job.planner.models.actor.llm.layers // len(machines)
    stages = tuple(PipelineStage(layers=layers, gpus=(f"{name}/0",)) for name in machines)
    return _trained_by(cluster, job, (stages,))


def _trained_by(cluster: Cluster, job: TrainingJob, pipelines: Sequence[tuple[PipelineStage, ...]]) -> Plan:
    limits = engine_limits(job, cluster)
    first = next(m for m in cluster.machines if m.name == pipelines[0][0].gpus[0].rpartition("/")[0])
    alone = plan_on_machine(cluster, job.planner, first, model_of(cluster, job.planner, {}), limits)
    samples, rest = divmod(alone.tasks[RlTask.ACTOR_TRAINING].replicas[0].samples, len(pipelines))
    training = TaskPlan(
        dp=len(pipelines), pp=len(pipelines[0]), tp=1,
        replicas=tuple(
            Replica(samples=samples + (place < rest), stages=stages) for place, stages in enumerate(pipelines)
        ),
    )  # fmt: skip
    group = TaskGroup(tasks=tuple(alone.tasks), gpus=tuple(dict.fromkeys((*alone.groups[0].gpus, *training.gpus))))
    tasks = {**alone.tasks, RlTask.ACTOR_TRAINING: training}
    plan = alone.model_copy(update={"groups": (group,), "tasks": tasks})
    check_plan(plan, cluster, job.planner)
    assert limits.faults(plan, cluster.view) == []
    return plan
