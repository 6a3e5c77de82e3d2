"""`python -m benchmarks.train_step.compare --case small`: see the README beside this file."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planner.record import markdown, write_result
from benchmarks.train_step.cases import CASES, Case
from benchmarks.train_step.side_processes import SideProcesses, StepDone
from benchmarks.train_step.sides import SIDES, Side

RESULTS = Path(__file__).resolve().parent / "results"
TOLERANCE = 1e-3
"""Largest relative gap in loss and gradient norm between two sides in any step: all do the same work."""
COLUMNS = ("side", "tokens per s", "tokens per CPU s", "CPU s per step", "wall / plain", "CPU / plain")


def main() -> None:
    """Run one case and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), default="small")
    parser.add_argument("--turns", type=int, default=5, help="measured steps of each side; one more warms up")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--sides", nargs="*", default=[side.name for side in SIDES])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    case = CASES[given.case]
    sides = [side for side in SIDES if side.name in given.sides and side.fits(case.shape)]
    with tempfile.TemporaryDirectory() as name:
        steps = run(case, sides, Path(name), given.turns, given.threads)
    data = summary(case, sides, steps)
    table = markdown(COLUMNS, [[data[side.name].get(column) for column in _FIELDS] for side in sides])
    settings = {
        "case": case.name, "tokens": case.num_tokens(), "turns": given.turns, "threads": given.threads,
        "dtype": "fp32", "tolerance": {"loss": TOLERANCE, "grad_norm": TOLERANCE},
        "versions": {package: version(package) for package in ("torch", "transformers", "accelerate", "megatron-core")},
    }  # fmt: skip
    write_result(f"train_step_{case.name}", settings, data, table, out=given.out)


_FIELDS = ("name", "tokens_per_s", "tokens_per_cpu_s", "cpu_s", "wall_to_plain", "cpu_to_plain")


def run(case: Case, sides: Sequence[Side], folder: Path, turns: int, threads: int) -> dict[str, list[StepDone]]:
    """Return the steps of each side; all live at once and take turns, so a busy machine slows each alike.

    Raises:
        RuntimeError: Two sides computed different losses or gradients.
    """
    model_dir = case.write_model(folder)
    steps: dict[str, list[StepDone]] = {side.name: [] for side in sides}
    with ExitStack() as stack:
        started = [stack.enter_context(SideProcesses(side, case, model_dir, folder, threads)) for side in sides]
        for turn in range(turns + 1):
            done = {processes.side.name: processes.step() for processes in started}
            _check_equal(turn, done)
            for name, step in done.items():
                steps[name].append(step)
    return {name: made[1:] for name, made in steps.items()}


def summary(case: Case, sides: Sequence[Side], steps: dict[str, list[StepDone]]) -> dict[str, dict[str, Any]]:
    """Return medians per side, and rates divided by those of the plain loop with as many processes."""
    tokens = case.num_tokens()
    found: dict[str, dict[str, Any]] = {}
    for side in sides:
        wall, cpu = _seconds(steps[side.name])
        found[side.name] = {
            "name": side.name, "processes": side.num_processes, "wall_s": median(wall), "cpu_s": median(cpu),
            "wall_s_range": [min(wall), max(wall)], "cpu_s_range": [min(cpu), max(cpu)],
            "tokens_per_s": tokens / median(wall), "tokens_per_cpu_s": tokens / median(cpu),
            "grad_norms": [step.grad_norm for step in steps[side.name]],
        }  # fmt: skip
    for side in sides:
        plain = steps.get(side.baseline)
        if plain is not None:
            # Turn by turn: what slows one step of a turn is likely to slow the next one.
            pairs = [_seconds(plain), _seconds(steps[side.name])]
            for clock, (theirs, ours) in zip(("wall", "cpu"), zip(*pairs, strict=True), strict=True):
                found[side.name][f"{clock}_to_plain"] = median(a / b for a, b in zip(theirs, ours, strict=True))
    return found


def _seconds(steps: Sequence[StepDone]) -> tuple[list[float], list[float]]:
    return [step.seconds.wall_s for step in steps], [step.seconds.cpu_s for step in steps]


def _check_equal(turn: int, done: dict[str, StepDone]) -> None:
    first_name, first = next(iter(done.items()))
    for name, step in done.items():
        for field in ("loss", "grad_norm"):
            ours, theirs = getattr(step, field), getattr(first, field)
            if not math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise RuntimeError(f"turn {turn}: {field} is {ours} in {name} and {theirs} in {first_name}")


if __name__ == "__main__":
    main()
