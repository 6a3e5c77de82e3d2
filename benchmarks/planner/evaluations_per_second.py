"""Full-plan evaluations per second and core, at 64 GPUs PPO and elsewhere.

    python -m benchmarks.planner.evaluations_per_second [--small]

Five loops: `new` prices plans whose six (four) tasks are all new, `evaluator` balanced compact plans that differ in one
mutation, `pricer` balances and prices candidates after one mutation, `search` is the whole evolutionary step with
mutation and local search, `sha_ea` a whole search by `sha-ea` with as many evaluations, its seeds and rankings of
layouts included. Processor time, one process, machine code ready (`first_call_s`: seconds until it was, mostly
compilation where no earlier process kept it). A busy machine slows processor time too (shared caches, sibling
threads), so `loop_m_per_s` says how many millions of plain Python additions a second it did meanwhile.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.planner.record import markdown, write_result
from plans.cost.model import CostModel
from plans.search.arms import arms_by_grouping
from plans.search.balancing import Balancing
from plans.search.budget import Budget, Meter
from plans.search.crew import Workshop
from plans.search.evolution import ArmState, EvolutionSettings
from plans.search.genome import Genome
from plans.search.mutations.exchange_machines import exchange_machines
from plans.search.pricing import Pricer
from plans.search.problem import Problem
from plans.search.run import SearchRun
from plans.search.seeds import draws
from plans.search.sha_ea import ShaEaPlanner
from plans.search.warm_up import load_machine_code
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed

CASES = (
    ("hetrl-multi-region-hybrid", "8b", "ppo", "sync"),
    ("hetrl-single-region", "8b", "ppo", "sync"),
    ("hetrl-multi-continent", "8b", "grpo", "async"),
    ("scaling-256", "8b", "ppo", "sync"),
    ("scaling-1024", "8b", "ppo", "sync"),
)


def main() -> None:
    """Run, write JSON and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=3000)
    parser.add_argument("--small", action="store_true", help="300 candidates, 64 GPUs only")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    count = 300 if arguments.small else arguments.candidates
    cases = CASES[:3] if arguments.small else CASES
    rows = [_measure(*case, model=model, count=count) for case in cases for model in ("paper", "calibrated")]
    columns = (
        "testbed", "size", "algorithm", "mode", "model", "new", "evaluator", "pricer", "search", "sha_ea",
        "first_call_s", "loop_m_per_s",
    )  # fmt: skip
    table = markdown(columns, [[row[column] for column in columns] for row in rows])
    write_result("evaluations_per_second", {"candidates": count}, rows, table, out=arguments.out)


def _measure(testbed: str, size: str, algorithm: str, mode: str, *, model: str, count: int) -> dict[str, Any]:
    job = hetrl_job(size, Algorithm(algorithm), Mode(mode))
    cost_model = CostModel.paper() if model == "paper" else CostModel.calibrated()
    problem = Problem(find_testbed(testbed).cluster, job, cost_model)
    begin = time.process_time()
    load_machine_code(problem, "sha-ea")
    first_call_s = time.process_time() - begin
    workshop = Workshop(problem, EvolutionSettings(), Balancing())
    arms = [arms[0] for arms in arms_by_grouping(problem, 0, cap=1, most_groupings=8)]
    states = [ArmState.start(arm, 0) for arm in arms]
    for state in states:
        workshop.evolution.grow(state, 12, lambda: True, lambda _price, _genome: None)
    candidates = _neighbours(workshop, states, count)
    pricer = Pricer(problem.evaluator, Balancing())
    pricer_rate = _rate(lambda: [pricer.price(genome) for genome in candidates], count)
    plans = [plan for plan in (pricer.compact(genome) for genome in candidates) if plan is not None]
    drawn = [pricer.compact(genome) for genome in _all_new(workshop, states, count)]
    new = [plan for plan in drawn if plan is not None]
    cold = Problem(problem.cluster, job, cost_model).evaluator
    new_rate = _rate(lambda: [cold.evaluate(plan) for plan in new], len(new))
    fresh = Problem(problem.cluster, job, cost_model).evaluator
    evaluator_rate = _rate(lambda: [fresh.evaluate(plan) for plan in plans], len(plans))
    share = count // len(states)

    def evolve() -> None:
        for state in states:
            workshop.evolution.grow(state, share, lambda: True, lambda _price, _genome: None)

    whole = Problem(problem.cluster, job, cost_model)
    run = SearchRun(meter=Meter(Budget(evaluations=count)), seed=0)
    return {
        "testbed": testbed, "size": size, "algorithm": algorithm, "mode": mode, "model": model,
        "new": new_rate, "evaluator": evaluator_rate, "pricer": pricer_rate,
        "search": _rate(evolve, share * len(states)),
        "sha_ea": _rate(lambda: ShaEaPlanner().search(whole, run), count),
        "first_call_s": first_call_s,
        "loop_m_per_s": _rate(lambda: sum(i * i for i in range(1_000_000)), 1),
    }  # fmt: skip


def _neighbours(workshop: Workshop, states: list[ArmState], count: int) -> list[Genome]:
    """Return candidates that are one mutation from the best of an arm, arms in blocks."""
    rng = draws(0, "evaluations_per_second")
    best = [state.best[1] for state in states if state.best is not None]
    share = -(-count // len(best))
    found = [workshop.evolution.mutate(genome, rng) for genome in best for _ in range(share)]
    return found[:count]


def _all_new(workshop: Workshop, states: list[ArmState], count: int) -> list[Genome]:
    """Return candidates with GPUs exchanged between groups and another layout of every task."""
    rng, ranker = draws(0, "all new"), workshop.tools.ranker
    best = [state.best[1] for state in states if state.best is not None]
    found = []
    for index in range(count):
        genome = best[index % len(best)]
        for _ in range(4):
            genome = exchange_machines(workshop.tools, genome, rng) or genome
        layouts = dict(genome.layouts)
        for task in layouts:
            guesses = ranker.guesses(task, genome.gpus[genome.group_of(task)])
            layouts[task] = guesses.build(guesses.random_recipe(rng)) or layouts[task]
        found.append(Genome(genome.grouping, genome.gpus, layouts))
    return found


def _rate(work: Any, count: int) -> float:  # noqa: ANN401 - a callable
    begin = time.process_time()
    work()
    return count / (time.process_time() - begin)


if __name__ == "__main__":
    main()
