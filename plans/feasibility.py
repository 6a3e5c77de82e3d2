"""Whether a job can fit a cluster's memory at all, and if not: need against have, and the cheapest change.

`find_fitting_plan` builds simple memory-lean placements (one replica, all blocks of GPUs as pipeline stages). What
it finds fits; where it finds nothing, `infeasible_error` says what is missing in the attempt that came closest, and
names the cheapest change that was tried and made an attempt fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plans.balance import proportional_shares
from plans.cost.compact import CompactPlan, CompactTask
from plans.cost.group_memory import MemoryPricer
from plans.errors import InfeasibleError, MemoryInfeasibleError, TooFewGpusError
from plans.spec.cluster import Cluster, Machine
from plans.spec.job import Job, Mode, Optimizer, Precision, Recompute
from plans.units import bytes_to_gb
from plans.workflow import RlTask, TaskKind, shape_of, workflow_of

#: Tensor-parallel degrees of the attempts.
TP_DEGREES = (8, 4, 2, 1)
#: Most splits between generation and the rest that are tried per TP degree.
MAX_CUTS = 32
#: Most GPUs that a suggested change adds.
MAX_ADDED_GPUS = 512


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Memory of one group of tasks in the attempt that came closest."""

    tasks: tuple[RlTask, ...]
    """Tasks of the group."""
    num_gpus: int
    """GPUs of the group."""
    need_gb: float
    """What models and working sets need on these GPUs, together."""
    have_gb: float
    """What these GPUs have beyond their reserves, together."""
    lacking_gb: float
    """Sum over GPUs of what each lacks: more than need - have where memory is unevenly used."""

    def sentence(self) -> str:
        """Return the shortfall as one clause."""
        names = ", ".join(task.value for task in self.tasks)
        return (
            f"the group ({names}) needs {self.need_gb:.1f} GB on {self.num_gpus} GPUs that have {self.have_gb:.1f} GB"
            f" and lacks {self.lacking_gb:.1f} GB"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A change of job or cluster."""

    text: str
    """What to do."""
    usd_per_hour: float
    """What it costs; 0 for a setting."""
    cluster: Cluster
    """The cluster after it."""
    job: Job
    """The job after it."""
    has_other_numerics: bool = False
    """Whether training computes other numbers after it."""


def find_fitting_plan(cluster: Cluster, job: Job) -> CompactPlan | None:
    """Return a placement whose memory fits, or None where the simple attempts find none."""
    memory = MemoryPricer(cluster.view, job)
    for plan in _attempts(cluster, job):
        if _overflow(memory, plan) <= 0.0:
            return plan
    return None


def require_fit(cluster: Cluster, job: Job) -> CompactPlan:
    """Return a placement that fits.

    Raises:
        InfeasibleError: none was found; the error says need, have and the cheapest change.
    """
    plan = find_fitting_plan(cluster, job)
    if plan is None:
        raise infeasible_error(cluster, job)
    return plan


def infeasible_error(cluster: Cluster, job: Job) -> InfeasibleError:
    """Return the error for a job that does not fit: need against have per group, and the cheapest change."""
    least = 2 if job.mode is Mode.ASYNC else 1
    if cluster.view.num_gpus < least:
        return TooFewGpusError(
            f"The job cannot be placed: an async job needs at least {least} GPUs, one for generation and one for "
            f"training, and the cluster has {cluster.view.num_gpus}; add GPUs, or use mode: sync."
        )
    shortfalls = closest_shortfalls(cluster, job)
    change = cheapest_change(cluster, job)
    remedy = f"the cheapest change found: {change.text}" if change else "no single change tried makes it fit"
    added = cheapest_gpus(cluster, job) if change and change.has_other_numerics else None
    remedy += f", or {added.text}" if added else ""
    clauses = "; ".join(shortfall.sentence() for shortfall in shortfalls)
    return MemoryInfeasibleError(f"The job does not fit this cluster: {clauses}; {remedy}.", shortfalls)


def closest_shortfalls(cluster: Cluster, job: Job) -> tuple[Shortfall, ...]:
    """Return the groups' memory in the attempt that lacks least; empty groups of lack 0 included."""
    memory = MemoryPricer(cluster.view, job)
    attempts = list(_attempts(cluster, job))
    best = min(attempts, key=lambda plan: _overflow(memory, plan))
    return tuple(_shortfall(cluster, memory, best, group) for group in best.groups)


def cheapest_change(cluster: Cluster, job: Job) -> Change | None:
    """Return the cheapest single change after which an attempt fits: settings first, then added GPUs by price."""
    for change in _setting_changes(cluster, job):
        if find_fitting_plan(change.cluster, change.job) is not None:
            return change
    return cheapest_gpus(cluster, job)


def cheapest_gpus(cluster: Cluster, job: Job) -> Change | None:
    """Return the cheapest addition of GPUs of one type after which an attempt fits, links left aside."""
    grown = [_added_gpus(cluster, job, machine) for machine in _one_machine_per_type(cluster)]
    return min((added for added in grown if added), key=lambda added: added.usd_per_hour, default=None)


def _setting_changes(cluster: Cluster, job: Job) -> Iterator[Change]:
    training = job.training
    if training.recompute is Recompute.NONE:
        yield _changed(cluster, job, "set training.recompute: full", recompute=Recompute.FULL)
    if training.micro_batch_size > 1:
        yield _changed(cluster, job, "set training.micro_batch_size: 1", micro_batch_size=1)
    if training.precision is Precision.FP32:
        yield _changed(cluster, job, "set training.precision: bf16", has_other_numerics=True, precision=Precision.BF16)
    if training.precision is Precision.BF16_MIXED:
        yield _changed(
            cluster,
            job,
            "set training.precision: bf16 (no FP32 master weights: other numerics)",
            has_other_numerics=True,
            precision=Precision.BF16,
        )
    if training.optimizer is not Optimizer.SGD:
        yield _changed(
            cluster,
            job,
            "set training.optimizer: sgd (no moments: other numerics)",
            has_other_numerics=True,
            optimizer=Optimizer.SGD,
        )


def _changed(cluster: Cluster, job: Job, text: str, *, has_other_numerics: bool = False, **settings: object) -> Change:
    training = job.training.model_copy(update=settings)
    return Change(text, 0.0, cluster, job.model_copy(update={"training": training}), has_other_numerics)


def _one_machine_per_type(cluster: Cluster) -> list[Machine]:
    return list({machine.gpu: machine for machine in reversed(cluster.machines)}.values())


def _added_gpus(cluster: Cluster, job: Job, machine: Machine) -> Change | None:
    """Return the change that adds the fewest GPUs of a machine's type, or None up to the limit."""
    low, high = 0, 1
    while find_fitting_plan(_grown(cluster, machine, high), job) is None:
        low, high = high, high * 2
        if high > MAX_ADDED_GPUS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if find_fitting_plan(_grown(cluster, machine, middle), job) is None:
            low = middle
        else:
            high = middle
    usd = high * cluster.gpu_type(machine.gpu).usd_per_hour
    text = f"add {high} x {machine.gpu} (for {usd:.2f} $/h)"
    return Change(text, usd, _grown(cluster, machine, high), job)


def _grown(cluster: Cluster, machine: Machine, added: int) -> Cluster:
    """Return the cluster with more GPUs in one machine; only its memory is meant, not its links."""
    intra = machine.intra_gb_s if machine.intra_gb_s is not None else 1.0
    bigger = machine.model_copy(update={"count": machine.count + added, "intra_gb_s": intra})
    machines = tuple(bigger if m.name == machine.name else m for m in cluster.machines)
    return Cluster(
        name=cluster.name, gpu_types=cluster.gpu_types, machines=machines, links=cluster.links, storage=cluster.storage
    )


def _attempts(cluster: Cluster, job: Job) -> Iterator[CompactPlan]:
    """Yield memory-lean placements: one group, or generation apart, with every TP degree."""
    tasks = workflow_of(job).tasks
    rest = tuple(task for task in tasks if task is not RlTask.ACTOR_GENERATION)
    for tp in TP_DEGREES:
        blocks = _blocks(cluster, tp)
        if not blocks:
            continue
        if job.mode is Mode.SYNC:
            yield CompactPlan((tasks,), {task: _lean_task(cluster, job, task, blocks) for task in tasks})
        for cut in range(1, len(blocks), max(1, len(blocks) // MAX_CUTS)):
            generation = _lean_task(cluster, job, RlTask.ACTOR_GENERATION, blocks[:cut])
            others = {task: _lean_task(cluster, job, task, blocks[cut:]) for task in rest}
            yield CompactPlan(((RlTask.ACTOR_GENERATION,), rest), {RlTask.ACTOR_GENERATION: generation} | others)


def _blocks(cluster: Cluster, tp: int) -> list[list[int]]:
    """Return groups of `tp` GPUs of one machine, smallest memory first."""
    view = cluster.view
    blocks: list[list[int]] = []
    for machine in range(len(view.machine_names)):
        members = np.flatnonzero(view.machine_of == machine).tolist()
        blocks += [members[i : i + tp] for i in range(0, len(members) - tp + 1, tp)]
    return sorted(blocks, key=lambda block: (float(view.memory_bytes[block[0]]), block))


def _lean_task(cluster: Cluster, job: Job, task: RlTask, blocks: Sequence[Sequence[int]]) -> CompactTask:
    """Return one replica over the blocks (the largest ones, at most one per layer), layers by memory."""
    layers = shape_of(job, task).layers
    used = list(blocks[-layers:])
    view = cluster.view
    room = [float(view.memory_bytes[block[0]] - view.reserve_bytes[block[0]]) for block in used]
    mbs = job.training.micro_batch_size if task.kind is TaskKind.TRAINING else 1
    grid = np.array([used], dtype=np.int32)
    return CompactTask(grid, proportional_shares(layers, room), (job.num_samples,), mbs)


def _overflow(memory: MemoryPricer, plan: CompactPlan) -> float:
    return sum(memory.group_memory(group, plan.tasks).overflow_bytes for group in plan.groups)


def _shortfall(cluster: Cluster, memory: MemoryPricer, plan: CompactPlan, group: tuple[RlTask, ...]) -> Shortfall:
    view = cluster.view
    outcome = memory.group_memory(group, plan.tasks)
    need, gpus = outcome.need_bytes, sorted({int(gpu) for task in group for gpu in plan.tasks[task].flat})
    have = float((view.memory_bytes - view.reserve_bytes)[gpus].sum())
    lacking = outcome.overflow_bytes
    return Shortfall(group, len(gpus), bytes_to_gb(need), bytes_to_gb(have), bytes_to_gb(lacking))
