"""Clusters, jobs and random plans for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from plans.cost.compact import CompactPlan, CompactTask
from plans.cost.evaluator import PlanEvaluator
from plans.cost.task_cost import ReplicaPlacement, StagePlacement, TaskCost, task_cost
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.spec.load import cluster_from_document, job_from_document
from plans.workflow import RlTask, shape_of, workflow_of

#: The paper's Table 1 (HetRL v1): memory, FP16 rate, HBM rate.
PAPER_TYPES = {
    "A100-40": {"memory_gb": 40, "tflops": 312, "hbm_gb_s": 2039, "usd_per_hour": 4.1},
    "L40S": {"memory_gb": 48, "tflops": 366, "hbm_gb_s": 864, "usd_per_hour": 1.86},
    "L4": {"memory_gb": 24, "tflops": 121, "hbm_gb_s": 300, "usd_per_hour": 0.8},
}
INTRA_GB_S = {"A100-40": 600, "L40S": 64, "L4": 64}


def paper_cluster(machines: Sequence[tuple[str, str, int]], *, latency_ms: float = 10.0, gbps: float = 5.0,
                  local_gbps: float = 400.0, memory_scale: float = 1.0) -> Cluster:  # fmt: skip
    """Return a cluster of (GPU type, region, count) machines with one rate inside and one between regions."""
    types = {name: {**row, "memory_gb": row["memory_gb"] * memory_scale} for name, row in PAPER_TYPES.items()}
    regions = sorted({region for _, region, _ in machines})
    pairs = [(a, b) for i, a in enumerate(regions) for b in regions[i + 1 :]]
    document = {
        "format": "motley.cluster/1",
        "name": "case",
        "gpu_types": types,
        "machines": [
            {"name": f"m{i}", "region": region, "gpu": gpu, "count": count, "intra_gb_s": INTRA_GB_S[gpu]}
            for i, (gpu, region, count) in enumerate(machines)
        ],
        "links": {
            "same_zone": {"latency_ms": 0, "bandwidth_gbps": local_gbps},
            "same_region": {"latency_ms": 0, "bandwidth_gbps": local_gbps},
            "regions": [{"between": [a, b], "latency_ms": latency_ms, "bandwidth_gbps": gbps} for a, b in pairs],
        },
    }
    return cluster_from_document(document, "case")


def scaled(cluster: Cluster, factor: float, *, what: str = "all", latency: float = 0.0) -> Cluster:
    """Return the cluster with rates multiplied, by kind, and with the latency between regions set."""
    document = cluster.model_dump(mode="json", exclude_none=True)
    for row in document["gpu_types"].values():
        if what in {"all", "gpu"}:
            row["tflops"] *= factor
            row["hbm_gb_s"] *= factor
    for machine in document["machines"]:
        machine["intra_gb_s"] *= factor if what in {"all", "links"} else 1.0
    links = document["links"]
    for link in (links["same_zone"], links["same_region"], *links["regions"]):
        link["bandwidth_gbps"] *= factor if what in {"all", "links"} else 1.0
    for link in links["regions"]:
        link["latency_ms"] = latency
    return cluster_from_document(document, "scaled")


def paper_job(shape: object = "qwen3-8b", *, algorithm: str = "ppo", mode: str = "sync", prompts: int = 384,
              responses: int = 8, prompt: int = 1024, response: int = 1024, **sections: object) -> Job:  # fmt: skip
    """Return the paper's job (batch 384 x 8, 1024 + 1024 tokens), with changes."""
    roles = ["actor", "reference", "reward"] + (["critic"] if algorithm == "ppo" else [])
    document = {
        "format": "motley.job/1",
        "name": "case",
        "algorithm": algorithm,
        "mode": mode,
        "max_staleness": 0 if mode == "sync" else 1,
        "models": {role: {"shape": shape} for role in roles},
        "batch": {"prompts": prompts, "responses_per_prompt": responses},
        "lengths": {"prompt": prompt, "response": response},
        **sections,
    }
    return job_from_document(document, "case")


def hand_task(grid: object, layers: Sequence[int], samples: Sequence[int], mbs: int = 1) -> CompactTask:
    """Return a task placement from nested lists of GPU indices [dp, pp, tp]."""
    return CompactTask(np.array(grid, dtype=np.int32), tuple(layers), tuple(samples), mbs)


def cost_of(evaluator: PlanEvaluator, task: RlTask, placement: CompactTask, batches: tuple[int, ...] = ()) -> TaskCost:
    """Return the cost by the readable formulas; it must be what the evaluator says."""
    replicas = [
        ReplicaPlacement(
            samples=samples,
            micro_batch_size=placement.micro_batch_size,
            stages=tuple(map(StagePlacement, placement.layers, stages)),
            decode_batch=batches[index] if batches else 1,
        )
        for index, (samples, stages) in enumerate(zip(placement.samples, placement.stages, strict=True))
    ]
    cost = task_cost(evaluator.terms[task], evaluator.view, evaluator.links, replicas)
    assert evaluator.task_s(task, placement, batches) == pytest.approx(cost.total_s, rel=1e-12)
    return cost


def random_plan(cluster: Cluster, job: Job, rng: np.random.Generator) -> CompactPlan:
    """Return a random valid plan: grouping, GPU sets, degrees, placement, layers and samples all random."""
    tasks = workflow_of(job).tasks
    labels = rng.integers(0, min(len(tasks), cluster.view.num_gpus), size=len(tasks))
    if job.mode.value == "async":
        labels[0] = len(tasks)
    groups = [tuple(t for t, mark in zip(tasks, labels, strict=True) if mark == g) for g in sorted(set(labels))]
    gpus = rng.permutation(cluster.view.num_gpus)
    cuts = np.sort(rng.choice(np.arange(1, len(gpus)), size=len(groups) - 1, replace=False))
    placed: dict[RlTask, CompactTask] = {}
    for group, members in zip(groups, np.split(gpus, cuts), strict=True):
        for task in group:
            placed[task] = random_task(job, task, members, rng)
    if rng.random() < 0.3 and any({RlTask.ACTOR_GENERATION, RlTask.ACTOR_TRAINING} <= set(g) for g in groups):
        placed[RlTask.ACTOR_GENERATION] = placed[RlTask.ACTOR_TRAINING]
    return CompactPlan(tuple(groups), {task: placed[task] for task in tasks})


def random_task(job: Job, task: RlTask, gpus: np.ndarray, rng: np.random.Generator) -> CompactTask:
    """Return a random placement of one task on some of the GPUs."""
    layers_total, n = shape_of(job, task).layers, len(gpus)
    shapes = [(d, p, t) for t in (1, 2, 4, 8) for p in (1, 2, 3, 4) for d in range(1, n // (p * t) + 1)
              if p <= layers_total and d <= job.num_samples]  # fmt: skip
    dp, pp, tp = shapes[rng.integers(len(shapes))]
    grid = rng.permutation(gpus)[: dp * pp * tp].reshape(dp, pp, tp)
    return CompactTask(grid, _split(layers_total, pp, rng), _split(job.num_samples, dp, rng), int(rng.integers(1, 3)))


def _split(total: int, parts: int, rng: np.random.Generator) -> tuple[int, ...]:
    cuts = np.sort(rng.choice(np.arange(1, total), size=parts - 1, replace=False)) if parts > 1 else []
    return tuple(int(x) for x in np.diff([0, *cuts, total]))
