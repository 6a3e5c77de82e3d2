"""Laws of every search on random tiny clusters, where brute force knows the optimum.

All methods price with the same model, so none is below the optimum of the plan space; what they return is valid, fits,
was found within the budget, and is found again from the same seed.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plans.cost import CostModel, price
from plans.errors import InfeasibleError, NoIncumbentError
from plans.plan import check_plan
from plans.plan_load import load_plan
from plans.search.budget import Budget
from plans.search.planner import METHODS, PlanResult, make_plan
from plans.search.problem import Problem
from plans.spec.job import Mode
from tests.helpers.exact_cases import bounded_brute_force, tiny_problem
from tests.helpers.planner_cases import scaled

TYPES = st.sampled_from(["A100-40", "L40S", "L4"])
#: One machine with two GPUs, or two or three machines with one each.
PAIRS = st.one_of(
    st.tuples(st.tuples(TYPES, st.just("a"), st.just(2))),
    st.tuples(st.tuples(TYPES, st.just("a"), st.just(1)), st.tuples(TYPES, st.sampled_from("ab"), st.just(1))),
)
MODELS = st.sampled_from([CostModel.paper(), CostModel.calibrated()])
METHODS_OF = {
    Mode.SYNC: [name for name, entry in METHODS.items() if not entry.is_async_only],
    Mode.ASYNC: list(METHODS),
}
CASES = [(method, mode) for mode, names in METHODS_OF.items() for method in names]


def search(problem: Problem, method: str, evaluations: int, seed: int) -> PlanResult | None:
    """Return what a method finds; None where it says that it found nothing."""
    budget = Budget(evaluations=evaluations)
    try:
        return make_plan(problem.cluster, problem.job, method, problem.model, budget, seed)
    except (NoIncumbentError, InfeasibleError):
        return None


@pytest.mark.parametrize(("method", "mode"), CASES)
@settings(max_examples=4, deadline=None)
@given(
    machines=PAIRS,
    model=MODELS,
    memory=st.sampled_from([0.1, 0.3, 0.8]),
    evaluations=st.integers(1, 150),
    seed=st.integers(0, 9),
)
def test_every_search_keeps_its_budget_and_the_rules_and_is_never_below_the_optimum(
    method: str, mode: Mode, machines, model: CostModel, memory: float, evaluations: int, seed: int
) -> None:
    problem = tiny_problem(machines, mode=mode.value, model=model, memory_scale=memory)
    result = search(problem, method, evaluations, seed)
    optimum_s = bounded_brute_force(problem).score_s
    if result is None:
        assert search(problem, method, evaluations, seed) is None
        return
    check_plan(result.plan, problem.cluster, problem.job)
    assert price(problem.cluster, problem.job, result.plan, model) == result.report
    assert result.report.feasible
    assert result.search.evaluations <= evaluations
    costs = [best for _, _, best in result.search.trace]
    assert all(later < earlier for earlier, later in itertools.pairwise(costs))
    assert result.iteration_s >= optimum_s * (1 - 1e-9)
    assert load_plan(result.plan.to_json(), "plan.json") == result.plan
    again = search(problem, method, evaluations, seed)
    assert again is not None
    assert again.plan.fingerprint == result.plan.fingerprint


@settings(max_examples=6, deadline=None)
@given(
    machines=PAIRS,
    mode=st.sampled_from(["sync", "async"]),
    model=MODELS,
    what=st.sampled_from(["gpu", "links", "latency"]),
    factor=st.sampled_from([1.1, 2.0, 7.0]),
)
def test_better_hardware_never_raises_the_optimum(
    machines, mode: str, model: CostModel, what: str, factor: float
) -> None:
    """Faster GPUs, wider links and lower latencies, whatever plan is best on each."""
    base = tiny_problem(machines, mode=mode, model=model)
    if what == "latency":
        better = scaled(base.cluster, 1.0, latency=10.0 / factor)
    else:
        better = scaled(base.cluster, factor, what=what, latency=10.0)
    found = [bounded_brute_force(Problem(cluster, base.job, model)).score_s for cluster in (base.cluster, better)]
    assume(math.isfinite(found[0]))  # two of the smallest GPUs are too few for an asynchronous job
    assert found[1] <= found[0] * (1 + 1e-12)


@settings(max_examples=6, deadline=None)
@given(machines=PAIRS, mode=st.sampled_from(list(Mode)), memory=st.floats(0.001, 0.02), model=MODELS)
def test_a_job_without_any_fitting_plan_is_infeasible_for_every_search(
    machines, mode: Mode, memory: float, model: CostModel
) -> None:
    """An error with need and have, never a large number."""
    problem = tiny_problem(machines, mode=mode.value, memory_scale=memory, model=model)
    assert math.isinf(bounded_brute_force(problem).score_s)
    for method in METHODS_OF[mode]:
        with pytest.raises(InfeasibleError, match=r"needs .* GB on .* GPUs that have"):
            make_plan(problem.cluster, problem.job, method, model, Budget(evaluations=20))
