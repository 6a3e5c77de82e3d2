"""Search against cluster size, 64 to 4,096 GPUs: time to within 2 % of the best known, memory, ratio to baselines.

Budgets are processor seconds of one process (wall-clock seconds with several workers). Results are written after every
run.

python -m benchmarks.planner.scaling                 # 64, 256, 1,024, 4,096 GPUs, 120 s each, 3 seeds
python -m benchmarks.planner.scaling --small         # 64 and 256 GPUs, 10 s, 1 seed
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.planner.record import markdown, write_result
from benchmarks.planner.trial import Trial, run_trial

SIZES = (64, 256, 1024, 4096)
BASELINES = ("verl", "deap", "random")
WITHIN = 1.02


def main() -> None:
    """Run, write JSON and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(str(size) for size in SIZES))
    parser.add_argument("--budget", default="120s", help="of every method")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--algorithm", default="ppo")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = [64, 256] if arguments.small else [int(size) for size in arguments.sizes.split(",")]
    budget, seeds = ("10s", 1) if arguments.small else (arguments.budget, arguments.seeds)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for method in ("sha-ea", *BASELINES):
            for seed in range(seeds if method == "sha-ea" else 1):
                trial = Trial(
                    testbed=f"scaling-{size}", size="8b", algorithm=arguments.algorithm, mode=arguments.mode,
                    method=method, budget=budget, seed=seed, workers=arguments.workers if method == "sha-ea" else 1,
                    processor_time=method != "sha-ea" or arguments.workers == 1,
                )  # fmt: skip
                row = run_trial(trial) | {"num_gpus": size}
                row.pop("plan", None)
                print(size, method, seed, row["iteration_s"], flush=True)
                rows.append(row)
                _write(arguments, rows, {"budget": budget, "seeds": seeds})


def _write(arguments: argparse.Namespace, rows: list[dict[str, Any]], used: dict[str, Any]) -> None:
    """Write what there is so far, so that an interrupted campaign leaves it."""
    sizes = list(dict.fromkeys(row["num_gpus"] for row in rows))
    table = markdown(
        ("GPUs", "best sha-ea (s)", "to within 2 % (s)", "first plan (s)", "evaluations", "peak GB", *BASELINES),
        [_summary(rows, size) for size in sizes],
    )
    settings = {key: str(value) for key, value in vars(arguments).items()} | used
    write_result("scaling", settings, rows, table, out=arguments.out)


def _summary(rows: list[dict[str, Any]], size: int) -> list[object]:
    own = [r for r in rows if r["num_gpus"] == size and r["method"] == "sha-ea" and r["iteration_s"] is not None]
    others = [
        next((r["iteration_s"] for r in rows if r["num_gpus"] == size and r["method"] == name), None)
        for name in BASELINES
    ]
    if not own:
        return [size, None, None, None, None, None, *others]
    best = min(r["iteration_s"] for r in own)
    reached = [next((at for at, _, cost in r["trace"] if cost <= WITHIN * best), None) for r in own]
    times = sorted(at for at in reached if at is not None)
    return [
        size,
        best,
        times[len(times) // 2] if len(times) > len(own) // 2 else None,
        max(r["trace"][0][0] for r in own),
        max(r["evaluations"] for r in own),
        max(r["peak_rss_gb"] for r in own),
        *others,
    ]


if __name__ == "__main__":
    main()
