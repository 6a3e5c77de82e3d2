"""Exact method on 8, 16 and 24 GPUs of the paper's testbed: time to proof or the gap left, and sha-ea against it.

    python -m benchmarks.planner.ilp_small                                  # all cases, 180 s, 10 seeds
    python -m benchmarks.planner.ilp_small --algorithms grpo --sizes 4b     # some of them
    python -m benchmarks.planner.ilp_small --small                          # 8 GPUs, 4B, GRPO, 10 s, 1 seed

Budgets are processor seconds of one process, so that a busy machine does not change what a method gets to do; wall
seconds are recorded beside them. `gap_to_plan` of sha-ea is against the best plan of `ilp`, `gap_to_bound` against
its proved bound: the truth lies between the two.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planner.record import markdown, write_result
from plans.cost.compact import compact_of
from plans.cost.model import CostModel
from plans.search.budget import Budget, Meter
from plans.search.ilp.planner import IlpPlanner
from plans.search.planner import find_planner
from plans.search.problem import Problem
from plans.search.protocol import Outcome, Planner
from plans.search.run import SearchRun
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import SIZES, hetrl_job
from plans.testbeds.registry import SMALL_COUNTS, find_testbed

COLUMNS = ("gpus", "size", "algorithm", "mode", "status", "iteration_s", "bound_s", "gap", "cpu_s", "wall_s",
           "ea_median_gap", "ea_worst_gap", "ea_median_gap_to_bound")  # fmt: skip


def main() -> None:
    """Run, write JSON and table after every case."""
    arguments = _parser().parse_args()
    if arguments.small:
        arguments.gpus, arguments.sizes, arguments.algorithms = "8", "4b", "grpo"
        arguments.seconds, arguments.seeds, arguments.ea_seconds = 10.0, 1, 2.0
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes.split(","):
        for algorithm in arguments.algorithms.split(","):
            for mode in arguments.modes.split(","):
                for gpus in arguments.gpus.split(","):
                    rows.append(_case(arguments, int(gpus), size, algorithm, mode))
                    table = markdown(COLUMNS, [[row.get(column) for column in COLUMNS] for row in rows])
                    settings = {key: str(value) for key, value in vars(arguments).items()}
                    write_result(arguments.name, settings, rows, table, out=arguments.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="hetrl-single-region")
    parser.add_argument("--gpus", default=",".join(str(count) for count in SMALL_COUNTS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--algorithms", default="grpo,ppo")
    parser.add_argument("--modes", default="sync")
    parser.add_argument("--model", default="paper", choices=("paper", "calibrated"))
    parser.add_argument("--seconds", type=float, default=180.0, help="processor seconds of ilp")
    parser.add_argument("--ea-seconds", type=float, default=10.0, help="processor seconds of each sha-ea run")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--name", default="ilp_small", help="of the result files")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser


def _case(arguments: argparse.Namespace, gpus: int, size: str, algorithm: str, mode: str) -> dict[str, Any]:
    model = CostModel.paper() if arguments.model == "paper" else CostModel.calibrated()
    cluster = find_testbed(f"{arguments.scenario}-{gpus}").cluster
    job = hetrl_job(size, Algorithm(algorithm), Mode(mode))

    def run(planner: Planner, seconds: float, seed: int) -> tuple[Outcome, float | None, dict[str, float]]:
        problem = Problem(cluster, job, model)  # new each time: no caches of another run
        cpu, wall = time.process_time(), time.monotonic()
        meter = Meter(Budget(seconds=seconds), time.process_time)
        outcome = planner.search(problem, SearchRun(meter=meter, seed=seed))
        used = {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - wall, "evaluations": meter.evaluations}
        if outcome.plan is None:
            return outcome, None, used
        return outcome, problem.evaluator.evaluate(compact_of(outcome.plan, cluster)).score_s, used

    exact, best_s, used = run(IlpPlanner(), arguments.seconds, 0)
    row: dict[str, Any] = {"gpus": gpus, "size": size, "algorithm": algorithm, "mode": mode, **used}
    row |= {"status": exact.status, "termination": exact.termination, "bound_s": exact.bound_s, "iteration_s": best_s}
    row["trace"] = exact.trace
    if best_s is None or exact.bound_s is None:
        return row
    row["gap"] = 1.0 - exact.bound_s / best_s
    found = [run(find_planner("sha-ea", job), arguments.ea_seconds, seed + 1) for seed in range(arguments.seeds)]
    costs = [cost for _, cost, _ in found if cost is not None]
    row["ea"] = [{"iteration_s": cost, **took} for _, cost, took in found]
    if costs:
        row["ea_median_gap"], row["ea_worst_gap"] = median(costs) / best_s - 1.0, max(costs) / best_s - 1.0
        row["ea_median_gap_to_bound"] = median(costs) / exact.bound_s - 1.0
    return row


if __name__ == "__main__":
    main()
