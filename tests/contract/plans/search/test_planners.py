"""What every search method promises, for each registered one."""

import itertools
import subprocess
import sys

import pytest

from plans.cost import CostModel, price
from plans.errors import InfeasibleError, MemoryInfeasibleError, NoIncumbentError, PlanMismatchError
from plans.plan import check_plan
from plans.plan_load import load_plan
from plans.search.budget import Budget
from plans.search.planner import METHODS, MethodError, make_plan
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from tests.helpers.exact_cases import tiny_problem

LIGHT = [name for name in METHODS if name in {"sha-ea", "verl", "streamrl", "deap", "random", "ilp"}]


def case(name="hetrl-multi-region-hybrid-16", size="4b", algorithm=Algorithm.GRPO, mode=Mode.ASYNC):
    return find_testbed(name).cluster, hetrl_job(size, algorithm, mode)


def case_of(method):
    if method != "ilp":
        return case()
    problem = tiny_problem([("A100-40", "a", 2), ("L4", "b", 1)], mode="async")  # one that is proved in a second
    return problem.cluster, problem.job


@pytest.mark.parametrize("model", [CostModel.paper(), CostModel.calibrated()], ids=["paper", "calibrated"])
@pytest.mark.parametrize("method", LIGHT)
def test_planner_returns_a_valid_priced_plan_within_budget(method, model):
    cluster, job = case_of(method)
    result = make_plan(cluster, job, method, model, Budget(evaluations=400), seed=1)
    check_plan(result.plan, cluster, job)
    report = price(cluster, job, result.plan, model)
    assert report == result.report
    assert report.feasible
    assert result.plan.method == method
    assert result.plan.predicted == report.to_document()
    assert 0 < result.search.evaluations <= 400
    costs = [best for _, _, best in result.search.trace]
    assert all(b < a for a, b in itertools.pairwise(costs))
    assert costs[-1] == pytest.approx(report.iteration_s, rel=1e-9)


@pytest.mark.parametrize("method", LIGHT)
def test_planner_repeats_itself(method):
    cluster, job = case_of(method)
    first, second = (
        make_plan(cluster, job, method, CostModel.paper(), Budget(evaluations=300), seed=7) for _ in range(2)
    )
    assert first.plan.fingerprint == second.plan.fingerprint
    assert first.search.evaluations == second.search.evaluations


@pytest.mark.parametrize("method", LIGHT)
def test_planner_plan_round_trips_through_json(method):
    cluster, job = case_of(method)
    plan = make_plan(cluster, job, method, CostModel.paper(), Budget(evaluations=200)).plan
    assert load_plan(plan.to_json(), "plan").to_json() == plan.to_json()


@pytest.mark.parametrize("method", [name for name in LIGHT if not METHODS[name].is_async_only])
def test_planner_refuses_a_job_that_cannot_fit(method):
    """H5: GPUs that are short are an error at once, never a wait."""
    cluster, job = case("hetrl-single-region-8", "14b", Algorithm.PPO, Mode.SYNC)
    with pytest.raises(InfeasibleError, match="cheapest change") as caught:
        make_plan(cluster, job, method, CostModel.paper(), Budget(evaluations=50))
    assert isinstance(caught.value, MemoryInfeasibleError)
    assert caught.value.shortfalls


def test_sha_ea_gives_the_same_plan_in_a_fresh_process_with_other_hash_seed():
    cluster, job = case()
    here = make_plan(cluster, job, budget=Budget(evaluations=600), seed=3, model=CostModel.paper()).plan.fingerprint
    code = (
        "from plans.cost import CostModel\n"
        "from plans.search.budget import Budget\n"
        "from plans.search.planner import make_plan\n"
        "from plans.spec.job import Algorithm, Mode\n"
        "from plans.testbeds.jobs import hetrl_job\n"
        "from plans.testbeds.registry import find_testbed\n"
        "cluster = find_testbed('hetrl-multi-region-hybrid-16').cluster\n"
        "job = hetrl_job('4b', Algorithm.GRPO, Mode.ASYNC)\n"
        "result = make_plan(cluster, job, budget=Budget(evaluations=600), seed=3, model=CostModel.paper())\n"
        "print(result.plan.fingerprint)\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "99")
    ]
    assert found == [here, here]


def test_sha_ea_gives_the_same_plan_for_any_number_of_workers():
    cluster, job = case()
    plans = [
        make_plan(cluster, job, budget=Budget(evaluations=400), seed=5, model=CostModel.paper(), workers=workers)
        for workers in (1, 2)
    ]
    assert plans[0].plan.fingerprint == plans[1].plan.fingerprint
    assert plans[0].search.evaluations == plans[1].search.evaluations


def test_sha_ea_is_not_worse_than_the_baselines():
    cluster, job = case("hetrl-multi-region-hybrid-24", "8b", Algorithm.GRPO, Mode.SYNC)
    found = {
        method: make_plan(cluster, job, method, CostModel.paper(), Budget(evaluations=1500)).iteration_s
        for method in ("sha-ea", "verl", "deap")
    }
    assert found["sha-ea"] <= min(found.values())


def test_stop_request_returns_the_best_so_far():
    cluster, job = case()
    seen = []
    result = make_plan(
        cluster,
        job,
        budget=Budget(evaluations=100_000),
        on_progress=seen.append,
        should_stop=lambda: len(seen) >= 2,
    )
    assert result.search.termination == "stopped"
    assert result.search.evaluations < 100_000


def test_warm_start_is_never_made_worse():
    cluster, job = case(mode=Mode.SYNC)
    good = make_plan(cluster, job, model=CostModel.paper(), budget=Budget(evaluations=800))
    for method in ("sha-ea", "random"):
        again = make_plan(cluster, job, method, CostModel.paper(), Budget(evaluations=30), seed=9, warm_start=good.plan)
        assert again.iteration_s <= good.iteration_s * (1 + 1e-12)


def test_warm_start_of_another_job_is_refused():
    cluster, job = case(mode=Mode.SYNC)
    other = make_plan(cluster, job, budget=Budget(evaluations=50)).plan
    with pytest.raises(PlanMismatchError, match="another job"):
        make_plan(cluster, hetrl_job("8b", Algorithm.GRPO, Mode.SYNC), warm_start=other)


def test_random_without_luck_says_that_the_budget_ended():
    cluster, job = case("hetrl-single-region-16", "4b", Algorithm.PPO, Mode.SYNC)
    with pytest.raises(NoIncumbentError, match="raise the budget"):
        make_plan(cluster, job, "random", CostModel.paper(), Budget(evaluations=1))


def test_unknown_method_is_refused_with_the_names():
    with pytest.raises(MethodError, match=r"'magic' is unknown; use one of sha-ea, .*random"):
        make_plan(*case(), method="magic")


def test_async_only_method_refuses_a_sync_job():
    with pytest.raises(MethodError, match=r"asynchronous jobs only, .* is sync; set mode: async"):
        make_plan(*case(mode=Mode.SYNC), method="streamrl")


def test_budget_in_seconds_ends_by_the_injected_clock():
    cluster, job = case()
    ticks = itertools.count()
    result = make_plan(cluster, job, budget=Budget(seconds=30.0), clock=lambda: next(ticks) * 0.01)
    assert result.search.termination == "budget"
    assert result.report.feasible
