"""`price`: what a plan costs on a cluster for a job, under a cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from plans.cost.collectives import LinkTimes
from plans.cost.iteration import PhaseTimes, combine
from plans.cost.ledger import DecodeBatch, MemoryLedger, batch_violations
from plans.cost.lengths import moments_of
from plans.cost.model import CostModel
from plans.cost.overlap import free_overlap_s
from plans.cost.report import Bottleneck, CostReport, GpuMemory, PhaseReport, TaskReport
from plans.cost.task_cost import ReplicaPlacement, StagePlacement, TaskCost, task_cost
from plans.cost.terms import build_terms
from plans.cost.transfer import StageSlots, WeightLine, transfer_s
from plans.plan import Plan, TaskPlan, check_plan
from plans.spec.cluster import Cluster, ClusterView
from plans.spec.job import Job
from plans.units import S_PER_HOUR, bytes_to_gb
from plans.workflow import RlTask, shape_of


def price(cluster: Cluster, job: Job, plan: Plan, model: CostModel, *, source_name: str = "plan") -> CostReport:
    """Return the price of a plan.

    Args:
        cluster: the cluster.
        job: the job.
        plan: a plan of exactly this cluster and job.
        model: `CostModel.paper()` or `CostModel.calibrated()`.
        source_name: the name that messages use for the plan, normally the file's path.

    Raises:
        PlanMismatchError: the plan carries another fingerprint.
        SpecError: the plan breaks a rule; all violations are listed. Too little memory or a forbidden link is not an
            error: the report says so in `feasible` and `violations`.
    """
    check_plan(plan, cluster, job, source_name=source_name)
    view = cluster.view
    placement = {task: _replicas(task_plan, view) for task, task_plan in plan.tasks.items()}
    ledger = MemoryLedger(view, job, placement)
    asked = [replica.decode_batch for replica in plan.tasks[RlTask.ACTOR_GENERATION].replicas]
    generation, batches = ledger.place_decode_batches(placement[RlTask.ACTOR_GENERATION], asked)
    placement[RlTask.ACTOR_GENERATION] = generation
    links = link_times(view, model)
    costs = {
        task: task_cost(build_terms(view, job, task, model), view, links, replicas)
        for task, replicas in placement.items()
    }
    line = WeightLine.of(shape_of(job, RlTask.ACTOR_TRAINING), job.weight_bytes_per_parameter)
    moved_s = transfer_s(line, view, links, model, _slots(placement[RlTask.ACTOR_TRAINING]), _slots(generation))
    group_of = {task: index for index, group in enumerate(plan.groups) for task in group.tasks}
    phases = combine(job.mode, {task: cost.total_s for task, cost in costs.items()}, group_of, moved_s, model.eta)
    violations = [*ledger.violations(), *batch_violations(batches), *_route_violations(costs, moved_s)]
    report = _report(cluster, job, model, placement, costs, phases, ledger, batches, violations)
    return report.model_copy(
        update={
            "free_overlap_s": _free_overlap_s(job, placement, costs, moved_s),
            "rings_proved": links.rings_proved,
        }
    )


def generation_s_by_machine(cluster: Cluster, job: Job, plan: Plan, model: CostModel) -> dict[str, float]:
    """Return for how long each machine generates once it has the weights, by machine: its slowest replica's seconds."""
    view = cluster.view
    ledger = MemoryLedger(view, job, {task: _replicas(placed, view) for task, placed in plan.tasks.items()})
    placed = plan.tasks[RlTask.ACTOR_GENERATION]
    asked = [replica.decode_batch for replica in placed.replicas]
    replicas, _ = ledger.place_decode_batches(_replicas(placed, view), asked)
    terms = build_terms(view, job, RlTask.ACTOR_GENERATION, model)
    seconds = task_cost(terms, view, link_times(view, model), replicas).replica_s
    found: dict[str, float] = {}
    for replica, needed in zip(placed.replicas, seconds, strict=True):
        for machine in {gpu.rpartition("/")[0] for stage in replica.stages for gpu in stage.gpus}:
            found[machine] = max(found.get(machine, 0.0), needed)
    return found


def link_times(view: ClusterView, model: CostModel) -> LinkTimes:
    """Return the times over a cluster's links under a model: as given, or with calibrated efficiencies."""
    if model.is_paper:
        return LinkTimes(view.machine_latency_s, view.machine_s_per_byte, latency_per_step=False)
    inverse = view.machine_s_per_byte / model.calibration.links.between_machines
    machines = range(inverse.shape[0])
    inverse[machines, machines] = view.machine_s_per_byte.diagonal() / model.calibration.links.within_machine
    return LinkTimes(view.machine_latency_s, inverse, latency_per_step=True)


def tokens_per_iteration(job: Job, model: CostModel) -> float:
    """Return prompt and response tokens of an iteration: maxima in paper mode, means when calibrated."""
    per_sample = float(job.lengths.total) if model.is_paper else moments_of(job.lengths).total
    return job.num_samples * per_sample


def _replicas(task_plan: TaskPlan, view: ClusterView) -> tuple[ReplicaPlacement, ...]:
    return tuple(
        ReplicaPlacement(
            samples=replica.samples,
            micro_batch_size=replica.micro_batch_size,
            stages=tuple(
                StagePlacement(stage.layers, tuple(view.gpu_index[gpu] for gpu in stage.gpus))
                for stage in replica.stages
            ),
        )
        for replica in task_plan.replicas
    )


def _free_overlap_s(
    job: Job,
    placement: Mapping[RlTask, Sequence[ReplicaPlacement]],
    costs: Mapping[RlTask, TaskCost],
    moved_s: float,
) -> float | None:
    gpus = {
        task: {gpu for replica in replicas for stage in replica.stages for gpu in stage.gpus}
        for task, replicas in placement.items()
    }
    seconds = free_overlap_s(job.mode, {task: cost.total_s for task, cost in costs.items()}, gpus, moved_s)
    return seconds if math.isfinite(seconds) else None


def _slots(replicas: Sequence[ReplicaPlacement]) -> list[StageSlots]:
    return [[(stage.layers, stage.gpus) for stage in replica.stages] for replica in replicas]


def _route_violations(costs: Mapping[RlTask, TaskCost], moved_s: float) -> list[str]:
    sentences = [
        f"{task.value} needs a link that is forbidden" for task, cost in costs.items() if math.isinf(cost.total_s)
    ]
    if math.isinf(moved_s):
        sentences.append("moving the new actor weights needs a link that is forbidden")
    return sentences


def _report(
    cluster: Cluster,
    job: Job,
    model: CostModel,
    placement: Mapping[RlTask, tuple[ReplicaPlacement, ...]],
    costs: Mapping[RlTask, TaskCost],
    phases: PhaseTimes,
    ledger: MemoryLedger,
    batches: Sequence[DecodeBatch],
    violations: Sequence[str],
) -> CostReport:
    view, iteration_s = cluster.view, phases.iteration_s
    tokens = tokens_per_iteration(job, model)
    usd_per_hour = math.fsum(float(view.usd_per_hour[gpu]) for gpu in sorted(ledger.gpus))
    is_finite = math.isfinite(iteration_s)
    return CostReport(
        iteration_s=iteration_s if is_finite else None,
        throughput_samples_s=job.num_samples / iteration_s,
        throughput_tokens_s=tokens / iteration_s,
        usd_per_hour=usd_per_hour,
        usd_per_million_tokens=usd_per_hour * iteration_s / S_PER_HOUR / tokens * 1e6 if is_finite else None,
        phases=_phase_report(phases) if is_finite else None,
        tasks={task: _task_report(cost) for task, cost in costs.items()},
        memory={view.gpu_ids[gpu]: _gpu_memory(ledger, gpu) for gpu in sorted(ledger.gpus)},
        feasible=not violations,
        violations=tuple(violations),
        model=model.mode.value,
        bottlenecks={task: _bottleneck(view, placement[task], cost) for task, cost in costs.items()},
        decode_batches=tuple(batch.used for batch in batches),
    )


def _phase_report(phases: PhaseTimes) -> PhaseReport:
    return PhaseReport(
        generation_s=phases.generation_s,
        inference_s=phases.inference_s,
        training_s=phases.training_s,
        transfer_s=phases.transfer_s,
    )


def _task_report(cost: TaskCost) -> TaskReport | None:
    if not math.isfinite(cost.total_s):
        return None
    return TaskReport(
        total_s=cost.total_s,
        comp_s=cost.comp_s,
        hbm_s=cost.hbm_s,
        tp_s=cost.tp_s,
        pp_s=cost.pp_s,
        dp_s=cost.dp_s,
        bubble_s=cost.bubble_s,
    )


def _gpu_memory(ledger: MemoryLedger, gpu: int) -> GpuMemory:
    entry = ledger.gpus[gpu]
    return GpuMemory(
        model_gb=bytes_to_gb(entry.model_bytes),
        working_gb=bytes_to_gb(entry.working_bytes),
        capacity_gb=bytes_to_gb(float(ledger.view.memory_bytes[gpu])),
    )


def _bottleneck(view: ClusterView, replicas: Sequence[ReplicaPlacement], cost: TaskCost) -> Bottleneck:
    replica, stage = cost.bottleneck
    gpus = tuple(view.gpu_ids[gpu] for gpu in replicas[replica].stages[stage].gpus)
    return Bottleneck(replica=replica, stage=stage, gpus=gpus)
