"""Search efficiency at 64 GPUs, like HetRL's Fig. 5: plan quality against budget for every method.

    python -m benchmarks.planner.search_efficiency                      # budgets 1..300 s, 10 seeds: many hours
    python -m benchmarks.planner.search_efficiency --small              # a few minutes, to see that it works

Budgets are processor seconds of one process. One run per method and seed at the largest budget gives all points from
its trace; `sha-ea`, which divides its budget, would do better at the small ones when told about them. A point is the
median over the seeds. `verl` does not use a seed. Results are written after every run, and runs that the result file
already has are kept, so that an interrupted campaign goes on where it stopped and methods can be searched for
different times: `seconds` in the table says how long, and the best plan of a shorter search stands for longer budgets,
where it could only have become better.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.planner.record import RESULTS, commit, markdown, write_result
from benchmarks.planner.trial import Trial, run_trial

BUDGETS_S = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SEEDLESS = ("verl", "streamrl", "ilp")


def main() -> None:
    """Run, write JSON, table and plot."""
    arguments = _parser().parse_args()
    budgets = [1.0, 3.0] if arguments.small else [float(b) for b in arguments.budgets.split(",")]
    seeds = 2 if arguments.small else arguments.seeds
    runs = _kept_runs(arguments)
    known = {(run["method"], run["seed"]) for run in runs}
    for seed in range(seeds):
        for method in arguments.methods.split(","):
            if (seed == 0 or method not in SEEDLESS) and (method, seed) not in known:
                runs.append(_run(arguments, method, seed, arguments.search_s or max(budgets)))
                _write(arguments, runs, budgets)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testbed", default="hetrl-multi-region-hybrid")
    parser.add_argument("--size", default="8b")
    parser.add_argument("--algorithm", default="ppo")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--methods", default="sha-ea,deap,verl,random", help="ilp may be added")
    parser.add_argument("--budgets", default=",".join(str(b) for b in BUDGETS_S), help="CPU seconds, comma-separated")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--search-s", type=float, help="CPU seconds of each search; the largest budget without it")
    parser.add_argument("--small", action="store_true", help="budgets 1 and 3 s, 2 seeds")
    parser.add_argument("--out", type=Path)
    return parser


def _run(arguments: argparse.Namespace, method: str, seed: int, budget: float) -> dict[str, Any]:
    trial = Trial(
        testbed=arguments.testbed,
        size=arguments.size,
        algorithm=arguments.algorithm,
        mode=arguments.mode,
        method=method,
        budget=f"{budget}s",
        seed=seed,
        processor_time=True,
    )
    row = run_trial(trial)
    row.pop("plan", None)
    print(method, seed, row["iteration_s"], flush=True)
    return row | {"commit": commit()["id"]}


def _name(arguments: argparse.Namespace) -> str:
    return f"search_efficiency_{arguments.testbed}_{arguments.size}_{arguments.algorithm}_{arguments.mode}"


def _kept_runs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs that the result file has; each carries the commit that made it."""
    file = (arguments.out or RESULTS) / f"{_name(arguments)}.json"
    if arguments.small or not file.exists():
        return []
    kept: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["data"]["runs"]
    return kept


def _write(arguments: argparse.Namespace, runs: list[dict[str, Any]], budgets: list[float]) -> None:
    rows = [{"method": run["method"], "budget_s": b, "iteration_s": _best_at(run, b)} for run in runs for b in budgets]
    medians = _medians(rows, budgets)
    columns = ("method", "runs", "seconds", *(f"{budget:g} s" for budget in budgets))
    counts = {method: sum(run["method"] == method for run in runs) for method in medians}
    searched = {run["method"]: run["budget"] for run in runs}
    table = markdown(
        columns,
        [(name, counts[name], searched[name], *(points[b] for b in budgets)) for name, points in medians.items()],
    )
    given = {key: str(value) for key, value in vars(arguments).items() if key != "out"}
    settings = given | {"clock": "processor seconds"}
    name = _name(arguments)
    data = {"runs": runs, "medians": _json_keys(medians)}
    folder = write_result(name, settings, data, table, out=arguments.out)
    _plot(medians, budgets, folder / f"{name}.png")


def _best_at(run: dict[str, Any], budget: float) -> float | None:
    """Return the cost of the best plan after so many seconds; None where there was none."""
    return min((cost for at, _, cost in run.get("trace", []) if at <= budget), default=None)


def _medians(rows: list[dict[str, Any]], budgets: list[float]) -> dict[str, dict[float, float | None]]:
    """Return the median per method and budget; None where half of the seeds have no plan."""
    medians: dict[str, dict[float, float | None]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        medians[method] = {}
        for budget in budgets:
            found = [r["iteration_s"] for r in rows if r["method"] == method and r["budget_s"] == budget]
            middle = statistics.median(float("inf") if value is None else value for value in found)
            medians[method][budget] = None if middle == float("inf") else middle
    return medians


def _json_keys(medians: dict[str, dict[float, float | None]]) -> dict[str, dict[str, float | None]]:
    return {method: {f"{b:g}": value for b, value in points.items()} for method, points in medians.items()}


def _plot(medians: dict[str, dict[float, float | None]], budgets: list[float], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for method, points in medians.items():
        xs = [b for b in budgets if points[b] is not None]
        axes.plot(xs, [points[b] for b in xs], marker="o", label=method)
    axes.set(xscale="log", yscale="log", xlabel="search budget (CPU s)", ylabel="predicted seconds per iteration")
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
