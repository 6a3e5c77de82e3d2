"""Search efficiency at 64 GPUs, like HetRL's Fig. 5: plan quality against budget for every method.

    python -m benchmarks.planner.search_efficiency                      # budgets 1..300 s, 10 seeds: many hours
    python -m benchmarks.planner.search_efficiency --small              # a few minutes, to see that it works

A method's point is the median over the seeds. `sha-ea` divides its budget, so each budget is a run of its own; the
other methods are anytime, so one run at the largest budget gives all their points. `verl` does not use a seed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.planner.record import markdown, write_result
from benchmarks.planner.trial import Trial, run_trial

BUDGETS_S = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)
ANYTIME = ("deap", "random", "verl", "streamrl")


def main() -> None:
    """Run, write JSON, table and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testbed", default="hetrl-multi-region-hybrid")
    parser.add_argument("--size", default="8b")
    parser.add_argument("--algorithm", default="ppo")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--methods", default="sha-ea,deap,verl,random")
    parser.add_argument("--budgets", default=",".join(str(b) for b in BUDGETS_S), help="seconds, comma-separated")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="budgets 1 and 3 s, 2 seeds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    budgets = [1.0, 3.0] if arguments.small else [float(b) for b in arguments.budgets.split(",")]
    seeds = 2 if arguments.small else arguments.seeds
    rows = [
        row
        for method in arguments.methods.split(",")
        for seed in range(1 if method in {"verl", "streamrl"} else seeds)
        for row in _runs(arguments, method, seed, budgets)
    ]
    medians = _medians(rows, budgets)
    columns = ("method", *(f"{budget:g} s" for budget in budgets))
    table = markdown(columns, [(method, *(points[b] for b in budgets)) for method, points in medians.items()])
    settings = {key: str(value) for key, value in vars(arguments).items()} | {"seeds": seeds, "budgets": budgets}
    name = f"search_efficiency_{arguments.testbed}_{arguments.size}_{arguments.algorithm}_{arguments.mode}"
    folder = write_result(name, settings, {"runs": rows, "medians": _json_keys(medians)}, table, out=arguments.out)
    _plot(medians, budgets, folder / f"{name}.png")


def _runs(arguments: argparse.Namespace, method: str, seed: int, budgets: list[float]) -> list[dict[str, Any]]:
    """Return one row per budget."""
    wanted = [max(budgets)] if method in ANYTIME else budgets
    rows = []
    for budget in wanted:
        trial = Trial(
            testbed=arguments.testbed,
            size=arguments.size,
            algorithm=arguments.algorithm,
            mode=arguments.mode,
            method=method,
            budget=f"{budget}s",
            seed=seed,
        )
        row = run_trial(trial)
        row.pop("plan", None)
        print(method, seed, budget, row["iteration_s"], flush=True)
        rows.append(row)
    if method not in ANYTIME:
        return [row | {"budget_s": budget} for row, budget in zip(rows, wanted, strict=True)]
    trace = rows[0].pop("trace", [])
    return [
        rows[0] | {"budget_s": b, "iteration_s": min((cost for at, _, cost in trace if at <= b), default=None)}
        for b in budgets
    ]


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
    axes.set(xscale="log", yscale="log", xlabel="search budget (s)", ylabel="predicted seconds per iteration")
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
