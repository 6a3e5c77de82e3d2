"""The exact method: proofs, infeasible jobs, time-outs, solvers."""

from __future__ import annotations

import math

import pytest

from plans.cost import price
from plans.cost.compact import compact_of
from plans.cost.model import CostModel
from plans.cost.overlap import Objective
from plans.errors import InfeasibleError, NoIncumbentError
from plans.explain import explain
from plans.search.budget import Budget, Meter
from plans.search.ilp.planner import IlpPlanner
from plans.search.planner import make_plan
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import SearchRun
from plans.spec.job import Algorithm, Mode
from plans.spec.load import cluster_from_document
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from tests.helpers.exact_cases import SHAPE, bounded_brute_force, counted_run, tiny_problem
from tests.helpers.planner_cases import paper_cluster, paper_job

COLD = IlpPlanner(warm_method=None)


def _seconds(problem: Problem, outcome: Outcome) -> float:
    assert outcome.plan is not None
    return problem.evaluator.evaluate(compact_of(outcome.plan, problem.cluster)).score_s


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("part_steps", [0, 4000])
def test_ilp_with_either_solver_proves_the_optimum(solver: str, part_steps: int) -> None:
    problem = tiny_problem([("A100-40", "a", 2), ("L4", "b", 1)])
    outcome = IlpPlanner(solver=solver, warm_method=None, part_steps=part_steps).search(problem, counted_run())
    best_s = bounded_brute_force(problem).score_s
    assert _seconds(problem, outcome) == pytest.approx(best_s, rel=1e-6)
    assert (outcome.optimal, outcome.status, outcome.termination) == (True, "optimal", "complete")
    assert outcome.bound_s == pytest.approx(best_s, rel=2e-6)
    assert outcome.bound_s is not None
    assert outcome.bound_s <= best_s


def test_ilp_by_name_starts_from_sha_ea_and_fills_the_record() -> None:
    problem = tiny_problem([("A100-40", "a", 1), ("L4", "b", 1)], mode="async")
    result = make_plan(problem.cluster, problem.job, method="ilp", model=problem.model, budget=Budget(evaluations=5000))
    assert (result.plan.method, result.search.optimal, result.search.status) == ("ilp", True, "optimal")
    assert result.search.bound_s == pytest.approx(result.iteration_s, rel=2e-6)
    assert result.iteration_s == pytest.approx(bounded_brute_force(problem).score_s, rel=1e-6)


def test_ilp_on_a_job_that_fits_nowhere_says_so_with_need_and_have() -> None:
    problem = tiny_problem([("L4", "a", 2)], memory_scale=0.15)
    outcome = COLD.search(problem, counted_run())
    assert (outcome.plan, outcome.optimal, outcome.status) == (None, False, "infeasible")
    assert outcome.infeasible is not None
    assert outcome.infeasible.startswith("The job does not fit this cluster: the group (")
    assert outcome.infeasible.endswith("No plan of any grouping, degrees and placement fits (proved).")
    with pytest.raises(InfeasibleError, match=r"needs .* GB on 2 GPUs that have .* GB"):
        make_plan(problem.cluster, problem.job, method=COLD, model=problem.model)


def test_ilp_out_of_time_without_a_plan_says_so() -> None:
    problem = tiny_problem([("A100-40", "a", 2), ("L4", "b", 1)])
    ticks = iter(range(1_000_000))
    run = SearchRun(meter=Meter(Budget(seconds=1.0), lambda: float(next(ticks))), seed=0)
    outcome = COLD.search(problem, run)
    assert (outcome.plan, outcome.optimal, outcome.status, outcome.termination) == (
        None,
        False,
        "no_solution",
        "budget",
    )
    assert outcome.bound_s is not None
    assert 0.0 < outcome.bound_s < bounded_brute_force(problem).score_s
    ticks = iter(range(1_000_000))
    with pytest.raises(NoIncumbentError, match=r"Method ilp found no feasible plan .*ended by: budget"):
        make_plan(problem.cluster, problem.job, method=COLD, model=problem.model, budget=Budget(seconds=1.0),
                  clock=lambda: float(next(ticks)))  # fmt: skip


def test_ilp_out_of_time_with_a_plan_prints_a_valid_gap() -> None:
    problem = tiny_problem([("A100-40", "a", 1), ("L40S", "a", 1), ("L4", "b", 1)], memory_scale=0.25)
    outcome = IlpPlanner().search(problem, counted_run(evaluations=400))
    best_s = bounded_brute_force(problem).score_s
    assert (outcome.optimal, outcome.status, outcome.termination) == (False, "feasible", "budget")
    assert outcome.bound_s is not None
    assert outcome.bound_s <= best_s <= _seconds(problem, outcome)


def test_ilp_on_a_cluster_too_large_for_a_proof_returns_its_first_plan_and_says_so() -> None:
    """64 GPUs on 8 machines have 10^9 classes of placements; making them would outlast any budget, and Ctrl-C."""
    cluster, job = find_testbed("hetrl-single-region").cluster, hetrl_job("4b", Algorithm.GRPO, Mode.SYNC)
    result = make_plan(cluster, job, "ilp", CostModel.paper(), Budget(evaluations=200))
    assert result.search.evaluations <= 200
    assert (result.search.optimal, result.search.bound_s) == (False, None)
    assert (result.search.status, result.search.termination) == ("feasible", "too large")
    assert "the cluster is too large for a proof" in explain(cluster, job, result.plan, result.report).search


def test_ilp_whose_budget_ends_while_it_makes_its_classes_stops_there() -> None:
    """24 GPUs have 25,000 classes; the clock jumps over the budget while they are made."""
    cluster, job = find_testbed("hetrl-single-region-24").cluster, hetrl_job("4b", Algorithm.GRPO, Mode.SYNC)
    ticks = iter(range(1_000_000))
    run = SearchRun(meter=Meter(Budget(seconds=300.0), lambda: float(next(ticks))), seed=0)
    outcome = COLD.search(Problem(cluster, job, CostModel.paper()), run)
    assert (outcome.plan, outcome.bound_s) == (None, None)
    assert (outcome.status, outcome.termination) == ("no_solution", "budget")
    assert next(ticks) < 1000


def test_ilp_stopped_by_the_caller_says_stopped() -> None:
    problem = tiny_problem([("A100-40", "a", 2)])
    run = SearchRun(meter=Meter(Budget(evaluations=1000), None, lambda: True), seed=0)
    assert COLD.search(problem, run).termination == "stopped"


def test_ilp_with_an_override_of_eta_proves_the_optimum_of_that_model() -> None:
    problem = tiny_problem([("A100-40", "a", 1), ("L4", "b", 1)], model=CostModel.paper(eta=0.5), memory_scale=0.6)
    outcome = COLD.search(problem, counted_run())
    assert outcome.optimal
    assert _seconds(problem, outcome) == pytest.approx(bounded_brute_force(problem).score_s, rel=1e-6)
    assert math.isfinite(_seconds(problem, outcome))


@pytest.mark.parametrize("model", [CostModel.paper(), CostModel.calibrated()], ids=["paper", "calibrated"])
def test_ilp_with_a_forbidden_link_proves_the_optimum(model: CostModel) -> None:
    plain = paper_cluster([("A100-40", "a", 1), ("L40S", "b", 1), ("L4", "c", 1)], memory_scale=0.3)
    document = plain.model_dump(mode="json", exclude_none=True)
    document["links"]["regions"] = [
        {"between": link["between"], "forbidden": True} if link["between"] == ["a", "c"] else link
        for link in document["links"]["regions"]
    ]
    job = paper_job(SHAPE, algorithm="grpo", prompts=64)
    problem = Problem(cluster_from_document(document, "case"), job, model)
    outcome = COLD.search(problem, counted_run())
    assert outcome.optimal
    assert _seconds(problem, outcome) == pytest.approx(bounded_brute_force(problem).score_s, rel=1e-6)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ilp_proves_the_least_makespan_of_free_overlap(mode: str) -> None:
    # Two tasks of one group on different GPUs: the makespan lets them overlap, the phases do not.
    problem = tiny_problem([("A100-40", "a", 2), ("L4", "b", 1)], mode=mode, memory_scale=0.5)
    outcome = IlpPlanner(warm_method=None, objective=Objective.FREE_OVERLAP).search(problem, counted_run())
    best_s = bounded_brute_force(problem, Objective.FREE_OVERLAP).score_s
    assert outcome.plan is not None
    assert (outcome.optimal, outcome.status) == (True, "optimal")
    report = price(problem.cluster, problem.job, outcome.plan, problem.model)
    assert report.free_overlap_s == pytest.approx(best_s, rel=1e-6)
    assert outcome.bound_s == pytest.approx(best_s, rel=2e-6)
    assert best_s <= bounded_brute_force(problem).score_s * (1.0 + 1e-12)
