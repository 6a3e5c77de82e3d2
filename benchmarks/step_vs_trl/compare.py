"""`python -m benchmarks.step_vs_trl.compare --case tiny --out result.json`: see the README beside this file."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.step_vs_trl.cases import CASES, Case
from benchmarks.step_vs_trl.clock import Seconds
from benchmarks.step_vs_trl.motley_steps import MotleySteps
from benchmarks.step_vs_trl.trl_steps import trl_steps

_LEARNING_RATE = 1e-5


def main() -> None:
    """Run one case and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), default="tiny")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each block")
    parser.add_argument("--blocks", type=int, default=2, help="alternations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = CASES[options.case]
    with tempfile.TemporaryDirectory() as name:
        result = compare(case, Path(name), options.steps, options.blocks, options.threads)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["ratio_trl_to_motley"]))


def compare(case: Case, folder: Path, steps: int, blocks: int, threads: int) -> dict[str, object]:
    """Alternate blocks of Motley's and TRL's steps; return medians, ratios and provenance."""
    model_dir = case.write_model(folder)
    motley: list[dict[str, Seconds]] = []
    trl: list[Seconds] = []
    for _ in range(blocks):
        engines = MotleySteps(case, model_dir, folder, threads, _LEARNING_RATE)
        engines.step()
        motley += [engines.step() for _ in range(steps)]
        engines.close()
        trl += trl_steps(case, model_dir, folder, steps, _LEARNING_RATE)
        # TRL's trainer leaves accelerate's process-wide state behind, which the next block sets up again.
        _reset_accelerate()
    parts = {f"{part}_s": _medians([step[part] for step in motley]) for part in ("generation", "training", "sync")}
    step_s = _medians([step["generation"] + step["training"] for step in motley])
    total_s = _medians([step["generation"] + step["training"] + step["sync"] for step in motley])
    trl_s = _medians(trl)
    return {
        "case": case.name,
        "num_completions": case.num_prompts * case.samples_per_prompt,
        "completion_tokens": case.completion_tokens,
        "dtype": "fp32",
        "threads": threads,
        "measured_steps": len(trl),
        "motley": {**parts, "step_s": step_s, "total_s": total_s},
        "trl": {"step_s": trl_s},
        "ratio_trl_to_motley": {
            f"{name}_{clock}": round(trl_s[clock] / mine[clock], 3)
            for name, mine in (("step", step_s), ("total", total_s))
            for clock in ("wall", "cpu")
        },
        "machine": _machine(),
        "commit": _commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "trl")},
    }


def _reset_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _medians(values: list[Seconds]) -> dict[str, float]:
    return {
        "wall": round(median(value.wall_s for value in values), 4),
        "cpu": round(median(value.cpu_s for value in values), 4),
    }


def _machine() -> dict[str, object]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_1min": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
