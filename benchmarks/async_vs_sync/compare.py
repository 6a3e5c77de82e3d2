"""Synchronous against asynchronous runs of the quickstart through a real Airflow: time, lag, score.

`python -m benchmarks.async_vs_sync.compare --out results.json --seeds 0 1 2 --bounds 0 1 2`

Every run has a deployment of its own, one after the other, same machine, same seeds. Bound 0 is the synchronous run.
Results are added to the file run by run, so that an interrupted comparison keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from benchmarks.planner.record import environment
from cli.deployment_processes import marked_processes
from cli.deployment_record import read_record
from storage.iterations import find_records
from storage.runs import IterationRecord
from storage.store import open_store

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart"


def main() -> int:
    """Run what is asked for and what the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=512)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for seed in arguments.seeds:
        for bound in arguments.bounds:
            if any((found["seed"], found["max_staleness"]) == (seed, bound) for found in results):
                continue
            results.append(measure(seed, bound, arguments.iterations, arguments.prompts))
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(results[-1]), flush=True)
    return 0


def job_of(bound: int, prompts: int) -> str:
    """Return the quickstart's job with a staleness bound; all else is equal."""
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["batch"]["prompts"] = prompts
    job["correction"] = {"name": "decoupled_ppo"}
    if bound:
        job |= {"mode": "async", "max_staleness": bound}
    return yaml.safe_dump(job)


def measure(seed: int, bound: int, iterations: int, prompts: int) -> dict[str, Any]:
    """Run once and return what its records say; nothing stays running."""
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as folder:
        home, place, started = Path(folder), environment(), time.monotonic()
        (home / "job.yaml").write_text(job_of(bound, prompts))
        try:
            motley(home, "run", "--job", str(home / "job.yaml"), "--cluster", str(EXAMPLE / "cluster.yaml"),
                   "--name", "r", "--iterations", str(iterations), "--seed", str(seed), "--json")  # fmt: skip
            used = {"cpu_s": cpu_seconds(home), "wall_s": time.monotonic() - started, "load_after": os.getloadavg()}
        finally:
            motley(home, "down", "--json")
        records = find_records(open_store(str(home / "store")), "r")
    settings = {"seed": seed, "max_staleness": bound, "iterations": iterations, "prompts": prompts}
    return {**settings, "environment": place, **used, **summary(records)}


def cpu_seconds(home: Path) -> float:
    """Return the CPU seconds of everything that runs for a deployment, ended children included."""
    record = read_record(home / "deployment.json")
    return sum(sum(process.cpu_times()[:4]) for process in marked_processes(record.id)) if record else 0.0


def motley(home: Path, *arguments: str) -> None:
    """Run the command; its output is shown when it fails."""
    environment = {**os.environ, "MOTLEY_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "cli", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"motley {arguments[0]} failed: {done.stderr[-2000:]}")


def summary(records: list[IterationRecord]) -> dict[str, Any]:
    """Return seconds per iteration (from the end of the second to the end of the last), lags and scores."""
    ends = [record.ended_at for record in records if record.ended_at is not None]
    lags: Counter[str] = Counter()
    for record in records:
        lags.update(record.metadata["lag_histogram"])
    scores = [value for record in records if (value := record.metrics.get("eval_reward_mean")) is not None]
    stages = {name for record in records[1:] for name in record.measured_s}
    return {
        "seconds_per_iteration": (ends[-1] - ends[1]).total_seconds() / (len(ends) - 2),
        "stage_seconds": {
            name: sum(record.measured_s.get(name, 0.0) for record in records[1:]) / (len(records) - 1)
            for name in sorted(stages)
        },
        "lag_histogram": dict(sorted(lags.items())),
        "score_before": records[0].metrics.get("eval_reward_mean_before"),
        "score_after": scores[-1] if scores else None,
        "effective_sample_fraction": [record.metrics.get("effective_sample_fraction") for record in records],
        "who_waits": [record.metadata["balance"] for record in records[1:]],
    }


if __name__ == "__main__":
    sys.exit(main())
