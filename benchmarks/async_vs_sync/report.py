"""Table of a comparison: every run, and asynchronous minus synchronous by seed.

`python -m benchmarks.async_vs_sync.report results.json`

Runs of one seed start from the same policy when one machine made them, so differences are taken seed by seed. With
each mean stands its standard error over seeds, which two or fewer seeds do not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    print("\n".join(lines(json.loads(parser.parse_args().results.read_text()))))


def lines(results: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of runs, and one line for each bound that says how it differs from bound 0."""
    runs = {(run["seed"], run["max_staleness"]): run for run in results}
    table = [
        "| seed | bound | iterations | s per iteration | rows by lag | score before, after | load after |",
        "|" + "---|" * 7,
    ]
    table += [_row(runs[key]) for key in sorted(runs)]
    for bound in sorted({bound for _, bound in runs} - {0}):
        pairs = [
            (runs[seed, bound], runs[seed, 0]) for seed, other in sorted(runs) if other == bound and (seed, 0) in runs
        ]
        if pairs:
            time = _mean([ours["seconds_per_iteration"] / sync["seconds_per_iteration"] for ours, sync in pairs])
            score = _mean([ours["score_after"] - sync["score_after"] for ours, sync in pairs])
            table.append(
                f"\nBound {bound} against 0, {len(pairs)} seeds: time per iteration times {time}, score {score}."
            )
    return table


def _row(run: dict[str, Any]) -> str:
    rows = sum(run["lag_histogram"].values())
    lags = ", ".join(f"{lag}: {100 * count / rows:.0f} %" for lag, count in run["lag_histogram"].items())
    scores = f"{run['score_before']:.3f}, {run['score_after']:.3f}"
    cells = [run["seed"], run["max_staleness"], run["iterations"], f"{run['seconds_per_iteration']:.1f}", lags, scores]
    return "| " + " | ".join(str(cell) for cell in [*cells, f"{run['load_after'][0]:.1f}"]) + " |"


def _mean(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):+.3f}"
    return mean if len(values) < 3 else f"{mean} +- {statistics.stdev(values) / len(values) ** 0.5:.3f}"


if __name__ == "__main__":
    main()
