"""HetRL's tables from cost-model values: speed-ups, load balancing, GPU combinations, error against the simulator.

    python -m benchmarks.planner.paper_tables --budget 60s           # all tables
    python -m benchmarks.planner.paper_tables --small                # 4B GRPO only, 3 s

Each ratio stands beside the paper's range and says whether it is in, above or below it. Budgets are processor seconds
of one process; a search that several tables need is done once per call. Results are written after every row; `--sizes`
and `--scenarios` do some of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import cache
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
from plans.cost import CostModel, price
from plans.cost.calibration import Calibration, ComputeEfficiency, GpuEfficiency, LinkEfficiency
from plans.plan_load import plan_from_document
from plans.simulate import SimulationResult, SimulationSettings, simulate
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import SIZES, hetrl_job
from plans.testbeds.registry import HETRL_SCENARIOS
from plans.workflow import RlTask

GPU_SETS: dict[str, tuple[tuple[str, int], ...]] = {
    "24 A100": (("A100-40", 24),),
    "24 A100 + 24 L40S": (("A100-40", 24), ("L40S", 24)),
    "24 A100 + 16 L4": (("A100-40", 24), ("L4", 16)),
    "24 L40S + 16 L4": (("L40S", 24), ("L4", 16)),
    "all 64": (("A100-40", 24), ("L40S", 24), ("L4", 16)),
}
#: The calibrated formulas with every efficiency 1: what the simulator assumes without settings.
PEAK = Calibration(
    default=GpuEfficiency(
        compute=ComputeEfficiency(generation=1.0, inference=1.0, training=1.0), hbm=1.0, decode_layer_overhead_s=0.0
    ),
    links=LinkEfficiency(within_machine=1.0, between_machines=1.0),
)
Row = dict[str, Any]
Rows = list[Row]


def main() -> None:
    """Run the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60s", help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="paper", choices=("paper", "calibrated"))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--algorithms", default="ppo,grpo")
    parser.add_argument("--scenarios", default=",".join(HETRL_SCENARIOS))
    parser.add_argument("--tables", default=",".join(TABLES), help="comma-separated")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.small:
        arguments.budget = "3s"
    for name in arguments.tables.split(","):
        rows: Rows = []
        for row in TABLES[name](arguments):
            rows.append(row)
            columns = tuple(rows[0])
            table = markdown(columns, [[each.get(column) for column in columns] for each in rows])
            settings = {key: str(value) for key, value in vars(arguments).items()}
            write_result(f"paper_{name}_{arguments.model}", settings, rows, table, out=arguments.out)


def speed_ups(arguments: argparse.Namespace) -> Iterator[Row]:
    """HetRL over verl and StreamRL: 4 scenarios x sizes x algorithms x modes."""
    for testbed in arguments.scenarios.split(","):
        for size, algorithm in _jobs(arguments):
            for mode in ("sync", "async"):
                own = _seconds(arguments, testbed, size, algorithm, mode, "sha-ea")
                for baseline in ("verl",) if mode == "sync" else ("verl", "streamrl"):
                    other = _seconds(arguments, testbed, size, algorithm, mode, baseline)
                    ratio = other / own if own and other else None
                    published = SPEED_UPS[f"{mode} {baseline}"][testbed]
                    yield (
                        {"scenario": testbed, "size": size, "algorithm": algorithm, "mode": mode, "sha-ea (s)": own,
                         "baseline": baseline, "baseline (s)": other, "ratio": ratio,
                         "paper": f"{published[0]}-{published[1]}", "verdict": verdict(ratio, published)}
                    )  # fmt: skip


def load_balancing(arguments: argparse.Namespace) -> Iterator[Row]:
    """The three strategies on against off."""
    for testbed, published in LOAD_BALANCING.items():
        for size, algorithm in _jobs(arguments):
            for mode in ("sync", "async"):
                on = _seconds(arguments, testbed, size, algorithm, mode, "sha-ea")
                off = _seconds(arguments, testbed, size, algorithm, mode, "sha-ea", balanced=False)
                ratio = off / on if on and off else None
                limit = published if mode == "sync" else None
                yield (
                    {"scenario": testbed, "size": size, "algorithm": algorithm, "mode": mode, "on (s)": on,
                     "off (s)": off, "ratio": ratio, "paper": f"up to {published[1]}" if limit else "not significant",
                     "verdict": verdict(ratio, limit)}
                )  # fmt: skip


def combinations(arguments: argparse.Namespace) -> Iterator[Row]:
    """GPU combinations in one region: HetRL over verl, and all GPUs over the A100s."""
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
                yield (
                    {"GPUs": name, "size": size, "algorithm": algorithm, "mode": mode, "sha-ea (s)": own,
                     "verl (s)": verl, "ratio": ratio, "paper": f"{published[0]}-{published[1]}",
                     "verdict": verdict(ratio, published), "over 24 A100": gain,
                     "verdict over A100": verdict(gain, ALL_OVER_A100) if name == "all 64" else "-"}
                )  # fmt: skip


def model_error(arguments: argparse.Namespace) -> Iterator[Row]:
    """The formulas against the simulator on the plans found, whole and by phase (HetRL prints no numbers for it).

    Everything runs at its peak on both sides: efficiencies that are put into both would tell nothing.
    """
    for testbed in arguments.scenarios.split(","):
        for size, algorithm in _jobs(arguments):
            for mode in ("sync", "async"):
                trial = _trial(arguments, testbed, size, algorithm, mode, "sha-ea")
                found = _found(trial)
                if found["iteration_s"] is None:
                    continue
                cluster, job = cluster_of(trial), hetrl_job(size, Algorithm(algorithm), Mode(mode))
                plan = plan_from_document(found["plan"], testbed)
                judged = simulate(cluster, job, plan, SimulationSettings(iterations=2))
                spans = _phase_spans(judged)
                row: Row = {"scenario": testbed, "size": size, "algorithm": algorithm, "mode": mode}
                for name, model in (("paper", CostModel.paper()), ("calibrated", CostModel.calibrated(PEAK))):
                    report = price(cluster, job, plan, model)
                    if report.iteration_s is None or report.phases is None:
                        continue
                    row |= {f"{name} (s)": report.iteration_s,
                            f"{name} error": report.iteration_s / judged.steady_iteration_s - 1.0}  # fmt: skip
                    phases = report.phases.model_dump()
                    row |= {f"{name} {kind} error": phases[f"{kind}_s"] / span - 1.0 for kind, span in spans.items()}
                yield row | {"simulator (s)": judged.steady_iteration_s, "plan from": arguments.model}


def _phase_spans(judged: SimulationResult) -> dict[str, float]:
    """Return the simulated seconds of each kind of task in the last iteration, from its first start to its last end."""
    last = max(entry.iteration for entry in judged.intervals)
    spans: dict[str, tuple[float, float]] = {}
    for entry in judged.intervals:
        if entry.iteration == last:
            kind = RlTask(entry.activity).kind.value
            begin, end = spans.get(kind, (entry.start_s, entry.end_s))
            spans[kind] = min(begin, entry.start_s), max(end, entry.end_s)
    return {kind: end - begin for kind, (begin, end) in spans.items()}


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "speed_ups": speed_ups,
    "load_balancing": load_balancing,
    "combinations": combinations,
    "model_error": model_error,
}


def _jobs(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    if arguments.small:
        return [("4b", "grpo")]
    return [(size, name) for size in arguments.sizes.split(",") for name in arguments.algorithms.split(",")]


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
        seed=arguments.seed, model=arguments.model, processor_time=True, **changes,
    )  # fmt: skip


@cache
def _found(trial: Trial) -> Row:
    return run_trial(trial)


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
    seconds: float | None = _found(trial)["iteration_s"]
    print(trial.testbed, size, algorithm, mode, method, changes or "", seconds, flush=True)
    return seconds


if __name__ == "__main__":
    main()
