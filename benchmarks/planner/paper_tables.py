"""HetRL's tables from cost-model values: speed-ups, load balancing, GPU combinations, error against the simulator.

    python -m benchmarks.planner.paper_tables --budget 60s           # all tables
    python -m benchmarks.planner.paper_tables --small                # 4B GRPO only, 3 s

Each ratio stands beside the paper's range and says whether it is in, above or below it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.planner.paper_ranges import (
    ALL_OVER_A100,
    COMBINATIONS,
    LOAD_BALANCING,
    SPEED_UPS,
    verdict,
)
from benchmarks.planner.record import markdown, write_result
from benchmarks.planner.trial import Trial, cluster_of, run_trial
from plans.plan_load import plan_from_document
from plans.simulate import SimulationSettings, simulate
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import SIZES, hetrl_job
from plans.testbeds.registry import HETRL_SCENARIOS

GPU_SETS: dict[str, tuple[tuple[str, int], ...]] = {
    "24 A100": (("A100-40", 24),),
    "24 A100 + 24 L40S": (("A100-40", 24), ("L40S", 24)),
    "24 A100 + 16 L4": (("A100-40", 24), ("L4", 16)),
    "24 L40S + 16 L4": (("L40S", 24), ("L4", 16)),
    "all 64": (("A100-40", 24), ("L40S", 24), ("L4", 16)),
}
Rows = list[dict[str, Any]]


def main() -> None:
    """Run the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60s", help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="paper", choices=("paper", "calibrated"))
    parser.add_argument("--tables", default=",".join(TABLES), help="comma-separated")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.small:
        arguments.budget = "3s"
    for name in arguments.tables.split(","):
        columns, rows = TABLES[name](arguments)
        table = markdown(columns, [[row.get(column) for column in columns] for row in rows])
        settings = {key: str(value) for key, value in vars(arguments).items()}
        write_result(f"paper_{name}", settings, rows, table, out=arguments.out)


def speed_ups(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Rows]:
    """HetRL over verl and StreamRL: 4 scenarios x sizes x algorithms x modes."""
    rows: Rows = []
    for testbed in HETRL_SCENARIOS:
        for size, algorithm in _jobs(arguments):
            for mode in ("sync", "async"):
                own = _seconds(arguments, testbed, size, algorithm, mode, "sha-ea")
                for baseline in ("verl",) if mode == "sync" else ("verl", "streamrl"):
                    other = _seconds(arguments, testbed, size, algorithm, mode, baseline)
                    ratio = other / own if own and other else None
                    published = SPEED_UPS[f"{mode} {baseline}"][testbed]
                    rows.append(
                        {"scenario": testbed, "size": size, "algorithm": algorithm, "mode": mode, "sha-ea (s)": own,
                         "baseline": baseline, "baseline (s)": other, "ratio": ratio,
                         "paper": f"{published[0]}-{published[1]}", "verdict": verdict(ratio, published)}
                    )  # fmt: skip
    return tuple(rows[0]), rows


def load_balancing(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Rows]:
    """The three strategies on against off."""
    rows: Rows = []
    for testbed, published in LOAD_BALANCING.items():
        for size, algorithm in _jobs(arguments):
            for mode in ("sync", "async"):
                on = _seconds(arguments, testbed, size, algorithm, mode, "sha-ea")
                off = _seconds(arguments, testbed, size, algorithm, mode, "sha-ea", balanced=False)
                ratio = off / on if on and off else None
                limit = published if mode == "sync" else None
                rows.append(
                    {"scenario": testbed, "size": size, "algorithm": algorithm, "mode": mode, "on (s)": on,
                     "off (s)": off, "ratio": ratio, "paper": f"up to {published[1]}" if limit else "not significant",
                     "verdict": verdict(ratio, limit)}
                )  # fmt: skip
    return tuple(rows[0]), rows


def combinations(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Rows]:
    """GPU combinations in one region: HetRL over verl, and all GPUs over the A100s."""
    rows: Rows = []
    for algorithm in ("grpo",) if arguments.small else ("ppo", "grpo"):
        for mode in ("sync", "async"):
            size = "4b" if arguments.small else "8b"
            only_a100: float | None = None
            for name, subset in GPU_SETS.items():
                own = _seconds(arguments, "hetrl-single-region", size, algorithm, mode, "sha-ea", subset=subset)
                verl = _seconds(arguments, "hetrl-single-region", size, algorithm, mode, "verl", subset=subset)
                only_a100 = own if name == "24 A100" else only_a100
                ratio = verl / own if own and verl else None
                gain = only_a100 / own if own and only_a100 else None
                published = COMBINATIONS[f"{algorithm} {mode}"]
                rows.append(
                    {"GPUs": name, "size": size, "algorithm": algorithm, "mode": mode, "sha-ea (s)": own,
                     "verl (s)": verl, "ratio": ratio, "paper": f"{published[0]}-{published[1]}",
                     "verdict": verdict(ratio, published), "over 24 A100": gain,
                     "verdict over A100": verdict(gain, ALL_OVER_A100) if name == "all 64" else "-"}
                )  # fmt: skip
    return tuple(rows[0]), rows


def model_error(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Rows]:
    """The analytic model against the simulator on the plans found (the paper's Fig. 7 has no numbers in text)."""
    rows: Rows = []
    for testbed in HETRL_SCENARIOS:
        for size, algorithm in _jobs(arguments):
            for mode in ("sync", "async"):
                trial = _trial(arguments, testbed, size, algorithm, mode, "sha-ea")
                found = run_trial(trial)
                if found["iteration_s"] is None:
                    continue
                job = hetrl_job(size, Algorithm(algorithm), Mode(mode))
                plan = plan_from_document(found["plan"], testbed)
                seconds = simulate(cluster_of(trial), job, plan, SimulationSettings(iterations=3)).steady_iteration_s
                error = found["iteration_s"] / seconds - 1.0
                rows.append(
                    {"scenario": testbed, "size": size, "algorithm": algorithm, "mode": mode,
                     "model (s)": found["iteration_s"], "simulator (s)": seconds, "model error": error}
                )  # fmt: skip
    return tuple(rows[0]), rows


TABLES: dict[str, Callable[[argparse.Namespace], tuple[tuple[str, ...], Rows]]] = {
    "speed_ups": speed_ups,
    "load_balancing": load_balancing,
    "combinations": combinations,
    "model_error": model_error,
}


def _jobs(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    return [("4b", "grpo")] if arguments.small else [(s, a) for s in SIZES for a in ("ppo", "grpo")]


def _trial(
    arguments: argparse.Namespace,
    testbed: str,
    size: str,
    algorithm: str,
    mode: str,
    method: str,
    **changes: Any,  # noqa: ANN401 - fields of Trial
) -> Trial:
    return Trial(
        testbed=testbed, size=size, algorithm=algorithm, mode=mode, method=method, budget=arguments.budget,
        seed=arguments.seed, model=arguments.model, **changes,
    )  # fmt: skip


def _seconds(
    arguments: argparse.Namespace,
    testbed: str,
    size: str,
    algorithm: str,
    mode: str,
    method: str,
    **changes: Any,  # noqa: ANN401 - fields of Trial
) -> float | None:
    trial = _trial(arguments, testbed, size, algorithm, mode, method, **changes)
    seconds: float | None = run_trial(trial)["iteration_s"]
    print(trial.testbed, size, algorithm, mode, method, changes or "", seconds, flush=True)
    return seconds


if __name__ == "__main__":
    main()
