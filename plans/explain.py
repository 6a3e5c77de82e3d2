"""A plan and its price in words and rows that a person can act on. No drawing: tables are the command line's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from plans.cost.report import CostReport
from plans.plan import Plan, TaskPlan
from plans.spec.cluster import Cluster
from plans.spec.job import Job, Mode
from plans.workflow import RlTask

#: `search.termination` of a method that had to leave its proof out.
TOO_LARGE = "too large"

#: Components of a task's cost with the words for them.
COMPONENTS = {
    "comp_s": "compute",
    "hbm_s": "decoding (memory bandwidth)",
    "tp_s": "tensor-parallel traffic",
    "pp_s": "pipeline traffic",
    "dp_s": "gradient all-reduce",
    "bubble_s": "pipeline fill",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task of a plan."""

    task: str
    """Task name."""
    group: int
    """Index of its group."""
    machines: str
    """Machines with the number of GPUs used on each."""
    dp: int
    """Replicas."""
    pp: int
    """Stages per replica."""
    tp: int
    """Shards per stage."""
    layers: str
    """Layers per stage, run-length coded."""
    samples: str
    """Samples per replica, run-length coded."""
    seconds: float | None
    """Predicted seconds; None over a forbidden link."""
    bottleneck: str
    """What the time is made of, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Memory on one machine's GPUs; the report has every GPU by itself."""

    machine: str
    """Machine name."""
    gpu_type: str
    """GPU type."""
    num_gpus: int
    """GPUs of the machine that hold a tasklet."""
    fullest: str
    """GPU with the largest share in use."""
    model_gb: float
    """Resident models of the fullest GPU."""
    working_gb: float
    """Largest working set of the fullest GPU."""
    capacity_gb: float
    """Memory of a GPU."""
    least_share: float
    """Share in use on the emptiest of these GPUs, in [0, 1]."""
    most_share: float
    """Share in use on the fullest GPU; above 1 where the plan does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a plan does and what limits it."""

    headline: str
    """Seconds, throughput and cost in one sentence."""
    tasks: tuple[TaskRow, ...]
    """One row per task, in workflow order."""
    memory: tuple[MemoryRow, ...]
    """Memory of the GPUs used."""
    limits: tuple[str, ...]
    """What limits the iteration, most important first."""
    cost: str
    """Money in one sentence."""
    idle: str
    """GPUs without work, in one sentence; empty when all work."""
    search: str
    """How the plan was found, in one sentence."""

    def text(self) -> str:
        """Return everything as plain text."""
        lines = [self.headline, ""]
        lines += [
            f"{row.task}: group {row.group}, dp {row.dp} x pp {row.pp} x tp {row.tp} on {row.machines}; "
            f"layers {row.layers}; samples {row.samples}; {_seconds(row.seconds)}; {row.bottleneck}"
            for row in self.tasks
        ]
        lines += ["", *self.limits, self.cost]
        lines += [line for line in (self.idle, self.search) if line]
        return "\n".join(lines) + "\n"


def explain(cluster: Cluster, job: Job, plan: Plan, report: CostReport) -> Explanation:
    """Return the explanation of a priced plan."""
    group_of = {task: index for index, group in enumerate(plan.groups) for task in group.tasks}
    return Explanation(
        headline=_headline(job, report),
        tasks=tuple(_task_row(cluster, task, entry, group_of[task], report) for task, entry in plan.tasks.items()),
        memory=tuple(_memory_rows(cluster, report)),
        limits=tuple(_limits(job, report)),
        cost=_cost(report),
        idle=_idle(cluster, plan),
        search=_search(plan),
    )


def run_lengths(values: Sequence[object]) -> str:
    """Return a sequence with repeats counted: [6, 6, 7] -> `2x6, 7`."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return ", ".join(f"{count}x{value}" if count > 1 else str(value) for value, count in runs)


def machines_used(gpus: Iterable[str]) -> str:
    """Return the machines of GPU ids with counts, numbered runs joined: `va-0..2 x8, oh-0 x4`."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        machine = gpu.rpartition("/")[0]
        counts[machine] = counts.get(machine, 0) + 1
    runs: list[tuple[str, str, int]] = []
    for machine, count in counts.items():
        if runs and runs[-1][2] == count and _follows(runs[-1][1], machine):
            runs[-1] = (runs[-1][0], machine, count)
        else:
            runs.append((machine, machine, count))
    return ", ".join(_run_name(first, last, count) for first, last, count in runs)


def _follows(first: str, second: str) -> bool:
    stem_a, _, number_a = first.rpartition("-")
    stem_b, _, number_b = second.rpartition("-")
    return stem_a == stem_b and number_a.isdigit() and number_b.isdigit() and int(number_b) == int(number_a) + 1


def _run_name(first: str, last: str, count: int) -> str:
    return f"{first} x{count}" if first == last else f"{first}..{last.rpartition('-')[2]} x{count}"


def _task_row(cluster: Cluster, task: RlTask, entry: TaskPlan, group: int, report: CostReport) -> TaskRow:
    splits = dict.fromkeys(run_lengths([stage.layers for stage in replica.stages]) for replica in entry.replicas)
    position = cluster.view.gpu_index
    cost = report.tasks.get(task)
    return TaskRow(
        task=task.value,
        group=group,
        machines=machines_used(sorted(entry.gpus, key=position.__getitem__)),
        dp=entry.dp,
        pp=entry.pp,
        tp=entry.tp,
        layers=" | ".join(splits),
        samples=run_lengths([replica.samples for replica in entry.replicas]),
        seconds=None if cost is None else cost.total_s,
        bottleneck=_bottleneck(task, report),
    )


def _bottleneck(task: RlTask, report: CostReport) -> str:
    cost = report.tasks.get(task)
    if cost is None:
        return "a link that it needs is forbidden"
    parts = sorted(((getattr(cost, name), words) for name, words in COMPONENTS.items()), key=lambda part: -part[0])
    shown = [f"{words} {seconds:.3g} s" for seconds, words in parts if seconds >= 0.1 * cost.total_s][:3]
    text = ", ".join(shown or [f"{parts[0][1]} {parts[0][0]:.3g} s"])
    where = report.bottlenecks.get(task)
    if where is None:
        return text
    return f"{text}; slowest: replica {where.replica}, stage {where.stage} on {machines_used(where.gpus)}"


def _memory_rows(cluster: Cluster, report: CostReport) -> Iterable[MemoryRow]:
    for machine in cluster.machines:
        used = [(gpu, report.memory[gpu]) for gpu in machine.gpu_ids if gpu in report.memory]
        if not used:
            continue
        shares = {gpu: (entry.model_gb + entry.working_gb) / entry.capacity_gb for gpu, entry in used}
        fullest = max(shares, key=lambda gpu: shares[gpu])
        entry = report.memory[fullest]
        yield MemoryRow(
            machine=machine.name,
            gpu_type=machine.gpu,
            num_gpus=len(used),
            fullest=fullest,
            model_gb=entry.model_gb,
            working_gb=entry.working_gb,
            capacity_gb=entry.capacity_gb,
            least_share=min(shares.values()),
            most_share=shares[fullest],
        )


def _headline(job: Job, report: CostReport) -> str:
    if report.iteration_s is None:
        return "The plan cannot run: it needs a forbidden link."
    state = "" if report.feasible else " It cannot run: " + "; ".join(report.violations[:3]) + "."
    return (
        f"{job.name} ({job.algorithm.value}, {job.mode.value}): {report.iteration_s:.4g} s per iteration, "
        f"{report.throughput_samples_s:.4g} samples/s, {report.throughput_tokens_s:.4g} tokens/s "
        f"({report.model} model).{state}"
    )


def _limits(job: Job, report: CostReport) -> Iterable[str]:
    phases, total = report.phases, report.iteration_s
    if phases is None or total is None:
        return
    named = {
        "generation": phases.generation_s,
        "inference": phases.inference_s,
        "training": phases.training_s,
        "weight transfer": phases.transfer_s,
    }
    if job.mode is Mode.ASYNC:
        rest = phases.inference_s + phases.training_s
        slower, faster = ("generation", "training") if phases.generation_s >= rest else ("training", "generation")
        longest, shortest = max(phases.generation_s, rest), min(phases.generation_s, rest)
        yield (
            f"Generation ({phases.generation_s:.4g} s) and inference with training ({rest:.4g} s) overlap; the side of "
            f"{slower} limits the iteration, the side of {faster} waits {longest - shortest:.3g} s."
        )
    ordered = sorted(named.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {seconds:.4g} s ({seconds / total:.0%})" for name, seconds in ordered)
    yield f"Phases of {total:.4g} s: {shares}."
    slowest = max((cost.total_s, task) for task, cost in report.tasks.items() if cost is not None)[1]
    yield f"The longest task is {slowest.value}: {_bottleneck(slowest, report)}."


def _cost(report: CostReport) -> str:
    per_token = report.usd_per_million_tokens
    return f"{report.usd_per_hour:.2f} $/h for the GPUs used" + (
        f", {per_token:.3g} $ per million tokens." if per_token is not None else "."
    )


def _idle(cluster: Cluster, plan: Plan) -> str:
    used = {gpu for entry in plan.tasks.values() for gpu in entry.gpus}
    idle = [gpu for gpu in cluster.view.gpu_ids if gpu not in used]
    return f"Without work: {machines_used(idle)}." if idle else ""


def _search(plan: Plan) -> str:
    search = plan.search
    if not search.evaluations:
        return ""
    proof = {True: ", proved optimal", False: ", not proved optimal", None: ""}[search.optimal]
    bound = f", lower bound {search.bound_s:.4g} s" if search.bound_s is not None else ""
    size = "; the cluster is too large for a proof" if search.termination == TOO_LARGE else ""
    return f"Found by {plan.method} in {search.evaluations} evaluations and {search.wall_s:.1f} s{proof}{bound}{size}."


def _seconds(seconds: float | None) -> str:
    return "no time" if seconds is None else f"{seconds:.4g} s"
