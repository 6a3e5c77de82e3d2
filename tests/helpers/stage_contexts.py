"""Contexts of stages on real stores, without engines: runs in two regions, policies of a few bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from stages.context import StageContext
from stages.contract import StageRequest
from stages.plan import ensure_plan
from stages.runs import ResolvedRun, create_run, resolve_run
from stages.staleness.buffer import RolloutBuffer
from stages.timing import Clock, Deadline, PhaseTimer
from storage.checkpoints import save_checkpoint
from storage.policies import Policy, publish_policy
from storage.rollouts import write_rollouts
from storage.runs import IterationRecord, write_iteration
from tests.helpers.storage_builders import NOW, rollout_rows

JOB = (Path(__file__).parent / "addition" / "job.yaml").read_text()
CLUSTER = """
format: motley.cluster/1
name: two-regions
machines:
  - {{name: a0, region: a, gpu: cpu, count: 2, intra_gb_s: 10}}
  - {{name: b0, region: b, gpu: cpu, count: 1}}
links: {{regions: [{{between: [a, b], latency_ms: 10, bandwidth_gbps: 1}}]}}
storage: {{a: "{base}/a", b: "{base}/b"}}
"""


def make_run(base: Path, *, iterations: int = 5, changes: Mapping[str, str] | None = None) -> ResolvedRun:
    """Create a run whose regions a (home) and b have roots of their own; `changes` replace text of the job."""
    job = JOB
    for old, new in (changes or {}).items():
        assert old in job
        job = job.replace(old, new)
    run = resolve_run(job, CLUSTER.format(base=base), "r", iterations, None, str(base / "none"))
    create_run(run)
    return run


def make_context(
    run: ResolvedRun, base: Path, stage: str, iteration: int, machine: str = "a0", *, is_planned: bool = True,
    **params: Any,
) -> StageContext:  # fmt: skip
    """Return the context of a stage, with the plans of iteration 0 and (unless told otherwise) of its own decided."""
    region = next(m.region for m in run.cluster.machines if m.name == machine)
    request = StageRequest.model_validate(
        {
            "stage": stage, "run": run.name, "iteration": iteration, "root": run.roots[region], "machine": machine,
            "state_dir": str(base / f"state-{machine}"), "attempt": "a1", "params": params,
        }
    )  # fmt: skip
    clock = Clock()
    context = StageContext(
        request, run, PhaseTimer(clock=clock), Deadline(clock=clock, ends_at=clock.monotonic() + 600)
    )
    ensure_plan(StageContext(request.model_copy(update={"iteration": 0}), run, context.timer, context.deadline))
    if is_planned:
        ensure_plan(context)
    return context


def publish(context: StageContext, version: int, *, is_head: bool = False) -> Policy:
    """Publish a resume point and a policy version of four numbers."""
    weights = save({"w": np.full(4, version, dtype=np.float32)})
    save_checkpoint(
        context.home, context.run.name, version, {"random_rank_0.safetensors": weights},
        config_hash=context.job.fingerprint, dataset_fingerprint="d", data_position={},
        rng_files=["random_rank_0.safetensors"],
        created_by="test", metadata={"buffer": RolloutBuffer(version=version).to_json()},
    )  # fmt: skip
    return publish_policy(
        context.home, context.run.name, version, {"model.safetensors": weights, "config.json": b"{}"},
        created_by="test", metadata={"training": {"counts": {}}}, is_head=is_head,
    )  # fmt: skip


def commit_iterations(context: StageContext, count: int) -> None:
    """Commit iterations 0 to `count`, exclusive, of a run: version 0, then the rows, record and version of each."""
    run = context.run.name
    publish(context, 0, is_head=True)
    for k in range(count):
        rows = rollout_rows(range(2), iteration=k)
        write_rollouts(context.home, run, k, 0, 1, rows, input_fingerprint="f", created_by="t")
        write_iteration(context.home, IterationRecord(run=run, iteration=k, ended_at=NOW))
        publish(context, k + 1, is_head=True)
