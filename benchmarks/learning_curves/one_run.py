"""One run of an arm, stage after stage in this process, without Airflow; the engines are processes of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.learning_curves.studies import Arm
from benchmarks.planner.record import commit
from stages.contract import StageName
from stages.plan_history import with_adoption
from stages.runs import ResolvedRun, resolve_run
from storage.iterations import find_records
from storage.runs import IterationRecord, write_plan
from storage.sql import connect
from storage.store import open_store
from tests.helpers.hand_run import ITERATION, PPO_ITERATION, HandRun


def measure(arm: Arm, seed: int, iterations: int | None, folder: Path) -> dict[str, Any]:
    """Run an arm with a seed; return what its records say.

    Args:
        arm: What to run.
        seed: Seed of the run.
        iterations: Iterations; those of the job with None.
        folder: Empty folder.

    Raises:
        RuntimeError: A stage failed.
    """
    started, load = time.monotonic(), os.getloadavg()
    run = HandRun(
        folder,
        resolve_run(yaml.safe_dump({**arm.job}), arm.cluster, arm.name, iterations, seed, str(folder / "store")),
    )
    if arm.plan is not None:
        plan = with_adoption(arm.plan(run.resolved), 0, "by hand (benchmarks.learning_curves)")
        write_plan(open_store(run.root), run.name, 0, plan.to_document())
    try:
        for k in range(run.resolved.iterations):
            run_iteration(run, k)
        cpu_s = _processor_s()
    finally:
        run.stop_engines()
    records = find_records(run.store, run.name)
    return {
        "arm": arm.name, "seed": seed, "iterations": run.resolved.iterations, "commit": commit()["id"],
        "wall_s": time.monotonic() - started, "cpu_s": cpu_s, "load_before": load,
        "score_before": records[0].metrics.get("eval_reward_mean_before"),
        "records": [_curve_point(record) for record in records],
        "gap_by_machine": gap_by_machine(run.resolved),
    }  # fmt: skip


def run_iteration(run: HandRun, k: int) -> None:
    """Run the stages of an iteration, each on the machines that have work by its plan."""
    queues = _run(run, StageName.PLAN, k, run.control)["queues"]
    order = PPO_ITERATION if run.resolved.job.ppo is not None else ITERATION
    for stage in ([StageName.PREPARE] if k == 0 else []) + [StageName(name) for name in order[1:]]:
        for machine in queues.get(stage.value, [run.control]):
            _run(run, stage, k, machine)


def _run(run: HandRun, stage: StageName, k: int, machine: str) -> Any:  # noqa: ANN401 - JSON
    code, result = run.run_here(stage.value, k, machine)
    if code:
        raise RuntimeError(f"{stage.value} of iteration {k} on {machine} failed: {result.error}.")
    return result.metrics


def _processor_s() -> float:
    """Return the processor seconds of this process and of the engines that it started."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def _curve_point(record: IterationRecord) -> dict[str, Any]:
    wanted = (
        "reward_mean", "eval_reward_mean", "value_loss", "explained_variance", "kl_weight", "reference_kl", "entropy",
        "sampler_gap_mean", "sampler_gap_max", "sampler_kl", "grad_norm",
    )  # fmt: skip
    return {name: record.metrics[name] for name in wanted if record.metrics.get(name) is not None}


def gap_by_machine(run: ResolvedRun) -> dict[str, float]:
    """Return how far the sampler's log-probs were from the trainer's, by the machine that sampled.

    The mean over responses of the largest gap of a response's tokens, nats.
    """
    with connect(open_store(run.home_root), run.name) as sql:
        rows = sql.sql(
            "SELECT machine, avg(logprob_gap_max) FROM completions "
            "WHERE split = 'train' AND logprob_gap_max IS NOT NULL GROUP BY 1 ORDER BY 1"
        ).fetchall()
    return {str(machine): float(gap) for machine, gap in rows}
