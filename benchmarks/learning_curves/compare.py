"""Learning curves of a study over seeds: real stages and engines, one process per run, no Airflow.

    python -m benchmarks.learning_curves.compare --study ppo --seeds 0 1 2 3 4           # engines' environment
    python -m benchmarks.learning_curves.compare --study numerics --lanes 2              # two runs side by side
    python -m benchmarks.learning_curves.compare --study numerics --arms fp32 mixed
    python -m benchmarks.learning_curves.compare --study ppo --iterations 2 --out /tmp/x  # to see that it works

Results are written after every run; runs that the result file already has are kept, so that an interrupted comparison
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.learning_curves.one_run import measure
from benchmarks.learning_curves.plot import draw
from benchmarks.learning_curves.studies import STUDIES, Study
from benchmarks.planner.record import markdown, write_result

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    """Run what is asked for and what the result file lacks."""
    arguments = _parser().parse_args()
    # Two OpenMP pools that spin on two cores are many times slower than two that sleep.
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    study = STUDIES[arguments.study]
    runs = _kept_runs(arguments.out, study)
    known = {(run["arm"], run["seed"], run["iterations"]) for run in runs}
    for done in _missing(arguments, study, known):
        runs.append(done)
        print(done["arm"], done["seed"], done["score_before"], *_scores(done), flush=True)
        _write(arguments, study, runs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=sorted(STUDIES), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--arms", nargs="+", help="arms of the study; all without it")
    parser.add_argument("--lanes", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def _missing(arguments: argparse.Namespace, study: Study, known: set[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the runs that are not known yet, as they end."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="learning-curves-") as folder,
        ProcessPoolExecutor(arguments.lanes, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        futures = []
        for seed in arguments.seeds:
            for arm in study.arms:
                is_wanted = arguments.arms is None or arm.name in arguments.arms
                if is_wanted and (arm.name, seed, arguments.iterations) not in known:
                    own = Path(folder, f"{arm.name}-{seed}")
                    own.mkdir()
                    futures.append(pool.submit(_measure, study.name, arm.name, seed, arguments.iterations, own))
        for future in as_completed(futures):
            yield future.result()


def _measure(study: str, arm: str, seed: int, iterations: int, folder: Path) -> dict[str, Any]:
    (found,) = [each for each in STUDIES[study].arms if each.name == arm]
    return measure(found, seed, iterations, folder)


def _kept_runs(out: Path, study: Study) -> list[dict[str, Any]]:
    """Return the runs that the result file has; each carries the commit that made it."""
    file = out / f"{study.name}.json"
    kept: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["data"] if file.exists() else []
    return kept


def _write(arguments: argparse.Namespace, study: Study, runs: list[dict[str, Any]]) -> None:
    runs.sort(key=lambda run: (run["seed"], [arm.name for arm in study.arms].index(run["arm"])))
    settings = {"study": study.name, "lanes": arguments.lanes}
    folder = write_result(study.name, settings, runs, report(study, runs), out=arguments.out)
    draw(study, runs, folder / f"{study.name}.png")


def report(study: Study, runs: list[dict[str, Any]]) -> str:
    """Return a table of the runs, and how each arm differs from the first one, seed by seed."""
    columns = ("seed", "arm", "iterations", "before", "after", *(f"{name}, first and last" for name in study.columns))
    lines = [markdown(columns, [_row(study, run) for run in runs])]
    last = {(run["arm"], run["seed"]): _scores(run)[-1] for run in runs if _scores(run)}
    first = study.arms[0].name
    for arm in study.arms[1:]:
        pairs = [score - last[first, seed] for (name, seed), score in last.items()
                 if name == arm.name and (first, seed) in last]  # fmt: skip
        if len(pairs) > 1:
            error = statistics.stdev(pairs) / len(pairs) ** 0.5
            gap = f"{statistics.fmean(pairs):+.3f} +- {error:.3f}"
            lines.append(f"\n{arm.name} against {first}, {len(pairs)} seeds: score {gap}.")
    return "\n".join(lines)


def _row(study: Study, run: dict[str, Any]) -> list[object]:
    cells: list[object] = [
        run["seed"],
        run["arm"],
        run["iterations"],
        run["score_before"],
        (_scores(run) or [None])[-1],
    ]
    for name in study.columns:
        values = [record[name] for record in run["records"] if name in record]
        cells.append(f"{values[0]:.3g}, {values[-1]:.3g}" if values else None)
    return cells


def _scores(run: dict[str, Any]) -> list[float]:
    return [record["eval_reward_mean"] for record in run["records"] if "eval_reward_mean" in record]


if __name__ == "__main__":
    main()
