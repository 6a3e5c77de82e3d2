"""Small clusters, jobs and plans whose simulated times can be worked out by hand."""

from __future__ import annotations

from plans.plan import PipelineStage, Plan, Replica, TaskGroup, TaskPlan
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.spec.load import load_cluster, load_job
from plans.workflow import RlTask, workflow_of

UNIT_GPU = "{memory_gb: 1000, tflops: 1, hbm_gb_s: 1000, usd_per_hour: 1}"
"""1e12 FLOP/s and 1e12 bytes/s: seconds are tera-operations."""


def cluster_of(machines: int = 1, gpus: int = 1, *, bandwidth_gbps: float = 8.0, latency_ms: float = 0.0) -> Cluster:
    """Equal machines of unit GPUs; 8 Gbps between machines is 1e9 bytes/s, 1000 GB/s inside."""
    rows = "\n".join(
        f"  - {{name: m{i}, region: r, gpu: unit, count: {gpus}, intra_gb_s: 1000}}" for i in range(machines)
    )
    return load_cluster(
        f"""
format: motley.cluster/1
name: unit
gpu_types: {{unit: {UNIT_GPU}}}
machines:
{rows}
links:
  same_zone: {{latency_ms: {latency_ms}, bandwidth_gbps: {bandwidth_gbps}}}
""",
        "cluster",
    )


def job_of(*, mode: str = "sync", staleness: int = 0, prompts: int = 4, response: int = 8, extra: str = "") -> Job:
    """A GRPO job with a rule as reward: generation, reference inference, actor training."""
    return load_job(
        f"""
format: motley.job/1
name: unit
algorithm: grpo
mode: {mode}
max_staleness: {staleness}
models:
  actor: &model
    shape:
      {{layers: 4, hidden: 64, intermediate: 128, heads: 4, kv_heads: 4, head_dim: 16, vocab: 100, tied: false}}
  reference: *model
  reward: {{verifier: exact}}
batch: {{prompts: {prompts}, responses_per_prompt: 2}}
lengths: {{prompt: 16, response: {response}}}
training: {{micro_batch_size: 1, recompute: none}}
{extra}
""",
        "job",
    )


def task_plan(
    gpus: list[list[list[str]]], samples: list[int], layers: list[int], decode_batch: int | None = None
) -> TaskPlan:
    """Plan of a task from [replica][stage][rank] GPU ids."""
    replicas = tuple(
        Replica(
            samples=count,
            decode_batch=decode_batch,
            stages=tuple(PipelineStage(layers=n, gpus=tuple(ids)) for n, ids in zip(layers, stages, strict=True)),
        )
        for stages, count in zip(gpus, samples, strict=True)
    )
    return TaskPlan(dp=len(gpus), pp=len(gpus[0]), tp=len(gpus[0][0]), replicas=replicas)


def plan_of(cluster: Cluster, job: Job, tasks: dict[RlTask, TaskPlan]) -> Plan:
    """A plan with one group in sync mode, and generation apart in async mode."""
    names = workflow_of(job).tasks
    parts = [names] if job.mode.value == "sync" else [names[:1], names[1:]]
    groups = tuple(
        TaskGroup(tasks=part, gpus=tuple(dict.fromkeys(g for t in part for g in tasks[t].gpus))) for part in parts
    )
    return Plan(method="hand", cluster=cluster.fingerprint, job=job.fingerprint, groups=groups, tasks=tasks)


def one_gpu_each(cluster: Cluster, job: Job, generation: str, rest: str) -> Plan:
    """Every task on one GPU: generation on one, the others on another (or the same)."""
    whole = [job.num_samples]
    return plan_of(
        cluster,
        job,
        {
            RlTask.ACTOR_GENERATION: task_plan([[[generation]]], whole, [4], decode_batch=8),
            RlTask.REFERENCE_INFERENCE: task_plan([[[rest]]], whole, [4]),
            RlTask.ACTOR_TRAINING: task_plan([[[rest]]], whole, [4]),
        },
    )
