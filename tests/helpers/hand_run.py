"""A run driven without Airflow: each stage is a process of its own, as a shell would start it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from stages.__main__ import run_request
from stages.contract import StageName, StageResult
from stages.engines.manager import EngineManager
from stages.runs import ResolvedRun, create_run, resolve_run
from stages.timing import Clock
from storage.store import Store, open_store

TINY_JOB = """
format: motley.job/1
name: tiny
algorithm: grpo
models:
  actor:
    shape: &shape
      {{layers: 2, hidden: 32, intermediate: 64, heads: 2, kv_heads: 1, head_dim: 32, vocab: 16, tied: true}}
  reference: {{shape: *shape}}
  reward: {{verifier: format}}
batch: {{prompts: 4, responses_per_prompt: 4}}
lengths: {{prompt: 7, response: 4}}
training: {{micro_batch_size: 16, recompute: none, precision: fp32}}
generation: {{max_num_seqs: 8}}
iterations: 3
seed: 5
source: {{type: init, warm_up: null}}
data: {{source: "arithmetic:addition", size: 40, held_out_fraction: 0.2}}
rewards:
  terms: [{{name: format, options: {{pattern: "[0-4].*"}}}}]
  score_truncated: true
optimizer: {{learning_rate: 1.0e-2}}
grpo: {{num_mini_batches: 2, kl: {{weight: 0.01}}}}
evaluation: {{every: 2, prompts: 4}}
storage: {{samples_per_shard: {samples_per_shard}}}
"""

CLUSTER = """
format: motley.cluster/1
name: one
machines: [{{name: local, region: here, gpu: cpu, count: {count}, intra_gb_s: 10}}]
"""

ITERATION = ("plan", "generate", "infer", "train", "commit_policy", "weight_sync", "evaluate", "report")
"""Stages of a GRPO iteration, in order."""

PPO_ITERATION = (
    "plan", "generate", "reward_inference", "reference_inference", "critic_inference", "train", "critic_training",
    "commit_policy", "weight_sync", "evaluate", "report",
)  # fmt: skip
"""Stages of a PPO iteration, in an order that its graph allows."""

TINY_PPO_JOB = (
    TINY_JOB.replace("algorithm: grpo", "algorithm: ppo")
    .replace("  reference: {{shape: *shape}}", "  critic: {{shape: *shape}}\n  reference: {{shape: *shape}}")
    .replace(
        "grpo: {{num_mini_batches: 2, kl: {{weight: 0.01}}}}",
        "ppo:\n  num_mini_batches: 2\n  kl: {{weight: 0.05, target: 0.5, horizon_samples: 64}}\n"
        "  critic_optimizer: {{learning_rate: 1.0e-2}}",
    )
)


def tiny_run(
    base: Path,
    *,
    samples_per_shard: int,
    name: str = "tiny-run",
    changes: str = "",
    count: int = 1,
    job_text: str = TINY_JOB,
) -> HandRun:
    """Create a run of a tiny job on one machine.

    Args:
        base: Folder of its own.
        samples_per_shard: Completions per shard.
        name: Name of the run.
        changes: Fields of the job, as YAML, that replace or add to those of the tiny job.
        count: CPU cores of the machine.
        job_text: The tiny job.
    """
    document = yaml.safe_load(job_text.format(samples_per_shard=samples_per_shard))
    job = yaml.safe_dump({**document, **(yaml.safe_load(changes) or {})})
    return HandRun(base, resolve_run(job, CLUSTER.format(count=count), name, None, None, str(base / "store")))


class HandRun:
    """A run in a folder of its own, with all machines on this computer."""

    def __init__(self, base: Path, resolved: ResolvedRun) -> None:
        """Create the run.

        Args:
            base: Folder for the state of the machines.
            resolved: The run; all its regions have one store.
        """
        self.base, self.name, self.resolved = base, resolved.name, resolved
        self.root = resolved.home_root
        create_run(resolved)

    @property
    def control(self) -> str:
        """Machine of the stages that only one machine does."""
        return self.resolved.cluster.machines[0].name

    def state_dir(self, machine: str | None = None) -> Path:
        """Return the state directory of a machine; that of the first one without a name."""
        return self.base / f"state-{machine or self.control}"

    @property
    def store(self) -> Store:
        return open_store(self.root)

    def stage(self, stage: str, iteration: int, expected_exit: int = 0, **params: Any) -> StageResult:
        """Run a stage in a fresh process and return its result."""
        path = self.write_request(stage, iteration, **params)
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "stages", stage, "--request", str(path)],
            env=environment, capture_output=True, text=True, timeout=3000, check=False,
        )  # fmt: skip
        assert done.returncode == expected_exit, done.stderr[-4000:]
        return StageResult.model_validate_json((path.parent / "result.json").read_bytes())

    def write_request(self, stage: str, iteration: int, machine: str | None = None, **params: Any) -> Path:
        """Write the request of a new attempt at a stage on a machine; return its path."""
        machine = machine or self.control
        jobs = self.state_dir(machine) / "jobs" / self.name / f"{iteration:06d}" / stage
        folder = jobs / f"attempt-{len(list(jobs.glob('attempt-*'))):03d}"
        folder.mkdir(parents=True)
        request = {
            "stage": stage, "run": self.name, "iteration": iteration, "root": self.root, "machine": machine,
            "state_dir": str(self.state_dir(machine)), "attempt": f"{stage}-{iteration}-{folder.name}",
            "params": params, "deadline_s": 3000.0,
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request))
        return folder / "request.json"

    def lane(self, *stages: tuple[str, int]) -> BaseProcess:
        """Start a process that runs stages one after the other and ends with the exit code of the first that fails.

        It is forked, so that it starts at once and two lanes really run side by side; call it before this process has
        used threads.
        """
        process = multiprocessing.get_context("fork").Process(target=self._run_all, args=(stages,))
        process.start()
        return process

    def _run_all(self, stages: Sequence[tuple[str, int]]) -> None:
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        for stage, iteration in stages:
            code = self.run_here(stage, iteration)[0]
            if code:
                os._exit(code)
        os._exit(0)

    def run_here(self, stage: str, iteration: int, machine: str | None = None) -> tuple[int, StageResult]:
        """Run a stage in this process; return its exit code and result."""
        path = self.write_request(stage, iteration, machine, **self._params(stage))
        code = run_request(StageName(stage), path, Clock())
        return code, StageResult.model_validate_json((path.parent / "result.json").read_bytes())

    def _params(self, stage: str) -> dict[str, str]:
        return {"region": self.resolved.home_region} if stage == "weight_sync" else {}

    def iteration(self, k: int) -> dict[str, StageResult]:
        """Run all stages of an iteration."""
        results: dict[str, StageResult] = {}
        for name in PPO_ITERATION if self.resolved.job.ppo is not None else ITERATION:
            results[name] = self.stage(name, k, **self._params(name))
            if name == "plan" and k == 0:
                results["prepare"] = self.stage("prepare", k)
        return results

    def stop_engines(self) -> int:
        """End the run's engines, as a reboot of the machines would."""
        return sum(EngineManager(self.state_dir(m.name)).stop_all() for m in self.resolved.cluster.machines)
