"""What is learned, and on what: a study compares its arms seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from plans.plan import PipelineStage, Plan, Replica, TaskGroup, TaskPlan
from plans.workflow import TaskKind, shape_of, workflow_of
from stages.runs import ResolvedRun

EXAMPLES = Path(__file__).parents[2] / "examples"

ONE_MACHINE = """
format: motley.cluster/1
name: one-core
machines: [{name: local, region: here, gpu: cpu, count: 1}]
"""

TWO_MACHINES = """
format: motley.cluster/1
name: two-machines
machines:
  - {name: first, region: here, gpu: cpu, count: 1}
  - {name: second, region: here, gpu: cpu, count: 1}
links: {same_zone: {latency_ms: 0.1, bandwidth_gbps: 10}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run a job."""

    name: str
    job: Mapping[str, Any]
    """Job document."""
    cluster: str = ONE_MACHINE
    """Cluster document, YAML."""
    plan: Callable[[ResolvedRun], Plan] | None = None
    """Makes the plan of all iterations; None leaves it to the planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Arms whose scores are compared with those of the first one."""

    name: str
    arms: tuple[Arm, ...]
    columns: tuple[str, ...] = ()
    """Metrics of the iteration records that are shown beside reward and score."""


def generation_on_both(run: ResolvedRun) -> Plan:
    """Return the plan that samples by halves on both machines and does all else on the first."""
    job, cluster = run.job.planner, run.cluster
    first, second = (machine.gpu_ids[0] for machine in cluster.machines)
    tasks = {}
    for task in workflow_of(job).tasks:
        gpus = (first, second) if task.kind is TaskKind.GENERATION else (first,)
        replicas = tuple(
            Replica(
                samples=job.num_samples // len(gpus),
                micro_batch_size=job.training.micro_batch_size,
                decode_batch=job.generation.max_num_seqs if task.kind is TaskKind.GENERATION else None,
                stages=(PipelineStage(layers=shape_of(job, task).layers, gpus=(gpu,)),),
            )
            for gpu in gpus
        )
        tasks[task] = TaskPlan(dp=len(gpus), pp=1, tp=1, replicas=replicas)
    group = TaskGroup(tasks=tuple(tasks), gpus=(first, second))
    return Plan(method="by-hand", cluster=cluster.fingerprint, job=job.fingerprint, groups=(group,), tasks=tasks)


def _example(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / name / "job.yaml").read_text(encoding="utf-8"))
    return document


def _numerics(name: str, generation: Mapping[str, Any]) -> Arm:
    job = _example("quickstart")
    job["engines"]["generation"] |= generation
    return Arm(name=name, job=job, cluster=TWO_MACHINES, plan=generation_on_both)


STUDIES: Final = {
    study.name: study
    for study in (
        Study(
            name="ppo",
            arms=(Arm(name="ppo", job=_example("ppo-quickstart")),),
            columns=("value_loss", "explained_variance", "kl_weight"),
        ),
        Study(
            name="numerics",
            arms=(
                _numerics("fp32", {"dtype": "fp32"}),
                _numerics("mixed", {"dtype": "fp32", "dtype_on": {"second": "bf16"}}),
                _numerics("bf16", {"dtype": "bf16"}),
            ),
            columns=("sampler_gap_mean", "sampler_gap_max", "sampler_kl"),
        ),
    )
}
"""By name."""
