"""Laws of exact search: ilp = brute force, bounds below every plan, names of GPUs don't matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.cost.compact import compact_of
from plans.cost.model import CostModel
from plans.search.brute_force_grids import Degrees
from plans.search.ilp.book import BoundBook
from plans.search.ilp.planner import IlpPlanner
from plans.search.problem import Problem
from plans.workflow import RlTask
from tests.helpers.exact_cases import Machines, bounded_brute_force, counted_run, tiny_problem
from tests.helpers.planner_cases import paper_cluster, paper_job, random_plan

TYPES = st.sampled_from(["A100-40", "L40S", "L4"])
MODELS = st.sampled_from([CostModel.paper(), CostModel.calibrated()])
MODES = st.sampled_from(["sync", "async"])


@st.composite
def machine_lists(draw: st.DrawFn, most_gpus: int) -> Machines:
    """Draw machines of one to two GPUs in up to two regions, two GPUs at least in all."""
    machines: list[tuple[str, str, int]] = []
    while sum(count for *_, count in machines) < 2:
        left = most_gpus - sum(count for *_, count in machines)
        machines.append((draw(TYPES), draw(st.sampled_from("ab")), draw(st.integers(1, min(2, left)))))
    if sum(count for *_, count in machines) < most_gpus and draw(st.booleans()):
        machines.append((draw(TYPES), draw(st.sampled_from("ab")), 1))
    return machines


def _solve(problem: Problem, part_steps: int) -> float:
    """Return the seconds that ilp proves optimal; infinite where it proves that nothing fits."""
    outcome = IlpPlanner(warm_method=None, part_steps=part_steps).search(problem, counted_run())
    assert outcome.status in {"optimal", "infeasible"}
    if outcome.plan is None:
        assert outcome.status == "infeasible"
        return math.inf
    return problem.evaluator.evaluate(compact_of(outcome.plan, problem.cluster)).score_s


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(machine_lists(3), MODES, MODELS, st.sampled_from([0.25, 0.4]), st.sampled_from([60, 4000]))
def test_ilp_equals_brute_force_on_grpo(
    machines: Machines, mode: str, model: CostModel, memory: float, part_steps: int
) -> None:
    problem = tiny_problem(machines, mode=mode, model=model, memory_scale=memory)
    assert _solve(problem, part_steps) == pytest.approx(bounded_brute_force(problem).score_s, rel=1e-6)


@settings(max_examples=5, deadline=None)
@given(machine_lists(2), MODES, MODELS, st.sampled_from([0.5, 0.8]), st.sampled_from([60, 4000]))
def test_ilp_equals_brute_force_on_ppo(
    machines: Machines, mode: str, model: CostModel, memory: float, part_steps: int
) -> None:
    problem = tiny_problem(machines, algorithm="ppo", mode=mode, model=model, memory_scale=memory)
    assert _solve(problem, part_steps) == pytest.approx(bounded_brute_force(problem).score_s, rel=1e-6)


@settings(max_examples=3, deadline=None)
@given(st.permutations([("A100-40", "a", 1), ("L40S", "a", 1), ("L4", "b", 1)]), MODES)
def test_ilp_does_not_depend_on_the_order_of_machines(machines: Machines, mode: str) -> None:
    plain = tiny_problem([("A100-40", "a", 1), ("L40S", "a", 1), ("L4", "b", 1)], mode=mode)
    assert _solve(tiny_problem(machines, mode=mode), 4000) == pytest.approx(_solve(plain, 4000), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(TYPES, st.sampled_from("ab"), st.integers(1, 4)), min_size=2, max_size=3),
    MODES,
    MODELS,
    st.sampled_from([10.0, 400.0, 5000.0]),
    st.sampled_from([8, 200]),
)
def test_bounds_of_tasks_are_below_the_price_of_any_plan(
    seed: int, machines: list[tuple[str, str, int]], mode: str, model: CostModel, local_gbps: float, prompts: int
) -> None:
    cluster = paper_cluster(machines, local_gbps=local_gbps)
    job = paper_job("qwen3-0.6b", algorithm="ppo", mode=mode, prompts=prompts, responses=4)
    problem = Problem(cluster, job, model)
    book, rng = BoundBook(problem), np.random.default_rng(seed)
    for _ in range(10):
        try:
            plan = random_plan(cluster, job, rng)
        except ValueError:
            continue  # more groups than GPUs were drawn
        evaluation = problem.evaluator.evaluate(plan)
        for task, placement in plan.tasks.items():
            if placement.micro_batch_size != 1 or not evaluation.feasible:
                continue  # bounds are on placements that fit
            degrees = Degrees(placement.dp, placement.pp, placement.tp)
            counts = np.bincount(problem.view.machine_of[placement.flat], minlength=len(machines)).tolist()
            if task is RlTask.ACTOR_GENERATION:
                concurrency = float(sum(evaluation.decode_batches) * placement.pp * placement.tp)
                bound_s = book.curve(degrees, counts).seconds(concurrency)
            else:
                book.of[task].share_split(degrees, 1e9)
                bound_s = book.of[task].seconds(degrees, counts)
            assert bound_s <= evaluation.task_s[task] * (1.0 + 1e-9)
