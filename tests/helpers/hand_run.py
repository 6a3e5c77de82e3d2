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


class HandRun:
    """A run in folders of its own."""

    def __init__(
        self,
        base: Path,
        *,
        samples_per_shard: int,
        name: str = "tiny-run",
        changes: str = "",
        count: int = 1,
        job_text: str = TINY_JOB,
    ) -> None:
        """Create the run.

        Args:
            base: Folder of its own.
            samples_per_shard: Completions per shard.
            name: Name of the run.
            changes: Fields of the job, as YAML, that replace or add to those of the tiny job.
            count: CPU cores of the machine.
            job_text: The tiny job.
        """
        self.base, self.name = base, name
        self.state_dir = base / "state"
        self.root = str(base / "store")
        document = yaml.safe_load(job_text.format(samples_per_shard=samples_per_shard))
        job = yaml.safe_dump({**document, **(yaml.safe_load(changes) or {})})
        self.resolved: ResolvedRun = resolve_run(job, CLUSTER.format(count=count), name, None, None, self.root)
        create_run(self.resolved)

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

    def write_request(self, stage: str, iteration: int, **params: Any) -> Path:
        """Write the request of a new attempt at a stage; return its path."""
        jobs = self.state_dir / "jobs" / self.name / f"{iteration:06d}" / stage
        folder = jobs / f"attempt-{len(list(jobs.glob('attempt-*'))):03d}"
        folder.mkdir(parents=True)
        request = {
            "stage": stage, "run": self.name, "iteration": iteration, "root": self.root, "machine": "local",
            "state_dir": str(self.state_dir), "attempt": f"{stage}-{iteration}-{folder.name}", "params": params,
            "deadline_s": 3000.0,
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
            path = self.write_request(stage, iteration, **({"region": "here"} if stage == "weight_sync" else {}))
            code = run_request(StageName(stage), path, Clock())
            if code:
                os._exit(code)
        os._exit(0)

    def iteration(self, k: int) -> dict[str, StageResult]:
        """Run all stages of an iteration."""
        results: dict[str, StageResult] = {}
        for name in PPO_ITERATION if self.resolved.job.ppo is not None else ITERATION:
            results[name] = self.stage(name, k, **({"region": "here"} if name == "weight_sync" else {}))
            if name == "plan" and k == 0:
                results["prepare"] = self.stage("prepare", k)
        return results

    def stop_engines(self) -> int:
        """End the run's engines, as a reboot of the machine would."""
        return EngineManager(self.state_dir).stop_all()
