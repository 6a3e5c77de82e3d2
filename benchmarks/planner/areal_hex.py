"""Benchmarks of `areal-hex`: scheduler time, repairs against the printed text, equal money, against `sha-ea`.

Run from the repository root: `python -m benchmarks.planner.areal_hex` (writes `results/areal_hex.json`).
`--only scheduler,money,methods` picks parts; parts that are left out keep what the file already holds. `--sizes 14b`
does the rows of some model sizes of the equal-money part; each row carries its own environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.planner.record import RESULTS, environment
from plans.cost import CostModel
from plans.errors import PlanningError
from plans.search.areal_hex.planner import ArealHexPlanner
from plans.search.areal_hex.settings import ArealHexSettings
from plans.search.budget import Budget
from plans.search.planner import PlanResult, make_plan
from plans.search.protocol import Planner
from plans.simulate import Efficiency, SimulationSettings, simulate
from plans.spec.cluster import Cluster
from plans.spec.job import Algorithm, Batch, Job, JobModels, Lengths, Mode, ModelSpec, VerifierSpec
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import HETRL_SCENARIOS, find_testbed
from plans.testbeds.testbed import machine_subset

#: GPUs -> (H800, H20, seconds that the paper's scheduler took).
SCHEDULER_CASES = {24: (8, 16, 14.9), 32: (8, 24, 23.1), 40: (8, 32, 46.7), 56: (8, 48, 120.0)}
#: Clusters of about equal money (areal_hex.md 1.5), and the published throughput ratios of the mixed one.
MONEY_CLUSTERS = {
    "H800 only": "areal-hex-h800-32",
    "H20 only": "areal-hex-h20-88",
    "mixed": "areal-hex-24-24",
    "mixed, 86.64 $/h": "areal-hex-8-24",
    "H800 only, 126.72 $/h": "areal-hex-h800-24",
}
PUBLISHED = {"1.5b": (1.36, 2.80), "7b": (1.31, 2.76), "14b": (1.50, 2.29)}
SIZES = ("1.5b", "7b", "14b")
#: Model sizes of the comparison on HetRL's scenarios.
METHOD_SIZES = ("8b",)
LIMIT = Budget(evaluations=2000)
#: About the CPU time of `areal-hex` with 8 classes of machines.
SHA_EA_LIMIT = Budget(evaluations=2500)
MODELS = {"calibrated": CostModel.calibrated(), "paper": CostModel.paper()}
#: What the simulator assumes, equal to the calibrated model's built-in coefficients.
EFFICIENCY = Efficiency(compute=0.42, hbm=0.65, network=0.80)


def areal_job(size: str) -> Job:
    """Return a job like the paper's: GRPO on a distilled Qwen2.5, long answers, a rule as reward (reconstruction)."""
    model = ModelSpec(shape=f"qwen2.5-{size}")
    return Job(
        name=f"areal-{size}",
        algorithm=Algorithm.GRPO,
        mode=Mode.ASYNC,
        max_staleness=4,
        models=JobModels(actor=model, reference=model, reward=VerifierSpec(verifier="math")),
        batch=Batch(prompts=256, responses_per_prompt=16),
        lengths=Lengths(prompt=1024, response=16384, prompt_mean=256.0, response_mean=6000.0, response_std=4500.0),
    )


def mixed_cluster(h800: int, h20: int) -> Cluster:
    """Return a part of the 56-GPU cluster."""
    testbed = find_testbed("areal-hex-8-48")
    return machine_subset(testbed, {"H800": h800, "H20": h20}, name=f"areal-hex-{h800}-{h20}").cluster


def planned(
    cluster: Cluster, job: Job, method: str | Planner, model: CostModel, limit: Budget = LIMIT
) -> tuple[PlanResult | None, dict[str, object]]:
    """Return a plan and its row: time, evaluations, phases; a failure is a row with its sentence."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        result = make_plan(cluster, job, method, model, limit)
    except PlanningError as error:
        return None, {"error": str(error), "cpu_s": time.process_time() - cpu}
    row: dict[str, object] = {
        "iteration_s": result.iteration_s,
        "evaluations": result.search.evaluations,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "usd_per_hour_rented": float(cluster.view.usd_per_hour.sum()),
    }
    phases = result.report.phases
    if phases is not None:
        row["phases"] = phases.model_dump() if hasattr(phases, "model_dump") else vars(phases)
    return result, row


def scheduler() -> list[dict[str, object]]:
    """Scheduler time and objective for 24 to 56 GPUs, against the printed method under the same model."""
    rows = []
    for gpus, (h800, h20, paper_s) in SCHEDULER_CASES.items():
        cluster = mixed_cluster(h800, h20)
        for size in SIZES:
            for name, model in MODELS.items():
                methods = {"areal-hex": ArealHexSettings(), "printed": ArealHexSettings.runnable_printed()}
                row: dict[str, object] = {"gpus": gpus, "size": size, "model": name, "paper_scheduler_s": paper_s}
                for label, settings in methods.items():
                    row[label] = planned(cluster, areal_job(size), ArealHexPlanner(settings=settings), model)[1]
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def money(sizes: Sequence[str] = SIZES) -> list[dict[str, object]]:
    """Clusters of equal money judged by the simulator."""
    rows = []
    for size in sizes:
        job = areal_job(size)
        row: dict[str, object] = {
            "size": size,
            "environment": environment(),
            "published_vs_h800": PUBLISHED[size][0],
            "published_vs_h20": PUBLISHED[size][1],
        }
        for label, name in MONEY_CLUSTERS.items():
            cluster = find_testbed(name).cluster
            row[label] = simulated_best(cluster, job)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def simulated_best(cluster: Cluster, job: Job) -> dict[str, object]:
    """Return the plan of the cluster that the simulator likes best among two settings, with its row."""
    flat = ArealHexSettings(pipelined_rollouts=False)
    best: dict[str, object] = {}
    for label, settings in {"flat": flat, "flat, dp across types": replace(flat, dp_across_types=True)}.items():
        result, row = planned(cluster, job, ArealHexPlanner(settings=settings), MODELS["calibrated"])
        if result is None:
            continue
        efficiency = dict.fromkeys(cluster.view.type_names, EFFICIENCY)
        seen = simulate(cluster, job, result.plan, SimulationSettings(iterations=6, efficiency=efficiency))
        usd = float(cluster.view.usd_per_hour.sum())
        tokens_s = job.num_samples * 6256.0 / seen.steady_iteration_s
        row |= {
            "settings": label,
            "simulated_iteration_s": seen.steady_iteration_s,
            "simulated_tokens_s": tokens_s,
            "tokens_per_usd": tokens_s * 3600.0 / usd,
            "producer_wait_s": seen.producer_wait_s,
            "consumer_wait_s": seen.consumer_wait_s,
        }
        if not best or row["simulated_tokens_s"] > best["simulated_tokens_s"]:  # type: ignore[operator]  # floats
            best = row
    return best


def methods() -> list[dict[str, object]]:
    """`areal-hex`, with and without its rule for DP groups, against `sha-ea` and `streamrl` on HetRL's scenarios."""
    rows = []
    for scenario in HETRL_SCENARIOS:
        cluster = find_testbed(scenario).cluster
        for size in METHOD_SIZES:
            job = hetrl_job(size, Algorithm.GRPO, Mode.ASYNC)
            for name, model in MODELS.items():
                row: dict[str, object] = {"scenario": scenario, "size": size, "model": name}
                relaxed = ArealHexPlanner(settings=ArealHexSettings(dp_across_types=True))
                row["areal-hex"] = planned(cluster, job, "areal-hex", model)[1]
                row["areal-hex, dp across types"] = planned(cluster, job, relaxed, model)[1]
                row["sha-ea"] = planned(cluster, job, "sha-ea", model, SHA_EA_LIMIT)[1]
                row["streamrl"] = planned(cluster, job, "streamrl", model)[1]
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


PARTS: dict[str, Callable[[], list[dict[str, object]]]] = {"scheduler": scheduler, "money": money, "methods": methods}


def main(arguments: list[str]) -> int:
    """Run the parts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "areal_hex.json")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--sizes", default=",".join(SIZES), help="of the equal-money part")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.only.split(","):
        if part == "money":
            results[part] = _with_rows(results.get(part), money(options.sizes.split(",")))
        else:
            results[part] = {"environment": environment(), "rows": PARTS[part]()}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _with_rows(part: object, rows: list[dict[str, object]]) -> dict[str, object]:
    """Return the part with the rows of these sizes replaced or added; the others stay as they were measured."""
    kept = part if isinstance(part, dict) else {"environment": environment(), "rows": []}
    new = {str(row["size"]): row for row in rows}
    others = [row for row in kept["rows"] if row["size"] not in new]
    ordered = sorted([*others, *new.values()], key=lambda row: SIZES.index(row["size"]))
    return {"environment": kept["environment"], "rows": ordered}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
