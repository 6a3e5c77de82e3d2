"""Laws: optimum of the counts, packing of what is counted, blindness to labels, money and memory monotone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.cost import CostModel
from plans.search.areal_hex.counts import Option, best_whole_counts, greedy_counts, most_rate, whole_makespan_s
from plans.search.areal_hex.machine_classes import machine_classes
from plans.search.areal_hex.planner import ArealHexPlanner
from plans.search.areal_hex.rollout_plan import RolloutPlanner
from plans.search.areal_hex.settings import ArealHexSettings
from plans.search.areal_hex.splits import SplitTable
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.search.problem import Problem
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_cluster, paper_job

JOB = paper_job("qwen3-4b", algorithm="grpo", mode="async", prompts=24)
OPTION = st.builds(
    lambda a, b, rate: Option({"a": a, "b": b}, rate, a + b),
    st.integers(1, 4), st.integers(0, 3), st.floats(1.0, 50.0),
)  # fmt: skip
CAPACITY = st.fixed_dictionaries({"a": st.integers(0, 8), "b": st.integers(0, 6)})
KINDS = ("A100-40", "L40S", "L4")


def every_count(options, capacity):
    tops = [min([capacity[r] // n for r, n in o.uses.items() if n], default=0) for o in options]
    for counts in itertools.product(*(range(top + 1) for top in tops)):
        if all(sum(c * o.uses[r] for c, o in zip(counts, options, strict=True)) <= capacity[r] for r in capacity):
            yield counts


@settings(max_examples=40, deadline=None)
@given(st.lists(OPTION, min_size=1, max_size=3), CAPACITY)
def test_counts_are_the_integer_optimum(options, capacity):
    rates = [option.tokens_per_s for option in options]

    def total(counts):
        return math.fsum(c * r for c, r in zip(counts, rates, strict=True))

    found = most_rate(options, capacity, rates)
    feasible = set(every_count(options, capacity))
    assert found in feasible
    assert total(found) == pytest.approx(max(map(total, feasible)))
    greedy = greedy_counts(options, capacity)
    assert greedy in feasible
    assert total(greedy) <= total(found) + 1e-9


@settings(max_examples=25, deadline=None)
@given(st.lists(OPTION, min_size=1, max_size=3), CAPACITY, st.integers(1, 30))
def test_whole_rollout_deadline_is_the_least_over_all_counts(options, capacity, rollouts):
    capacity_at = [lambda t, o=o: min(rollouts, int(t * o.tokens_per_s / 100.0 + 1e-9)) for o in options]
    _, found_s = best_whole_counts(options, capacity, capacity_at, rollouts, 1e6)
    best_s = min(whole_makespan_s(capacity_at, counts, rollouts, 1e6) for counts in every_count(options, capacity))
    assert found_s == pytest.approx(best_s) or found_s == best_s


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.sampled_from([1, 2, 4]))
def test_counted_replicas_always_pack(sizes, least_gpus):
    cluster = paper_cluster([("A100-40", "r", size) for size in sizes])
    problem = Problem(cluster, JOB, CostModel.calibrated())
    view = cluster.view
    free = {m: np.flatnonzero(view.machine_of == m).tolist() for m in range(len(sizes))}
    plan = RolloutPlanner(problem.evaluator, machine_classes(view), ArealHexSettings()).plan(free, least_gpus)
    if plan is None:
        assert max(sizes) < least_gpus or sum(sizes) < 2
        return
    used = [gpu for r in plan.replicas for stage in r.stages for gpu in stage]
    assert len(used) == len(set(used))
    assert sum(r.rollouts for r in plan.replicas) == JOB.num_samples
    for replica in plan.replicas:
        assert all(len({int(view.machine_of[g]) for g in stage}) == 1 for stage in replica.stages)
        assert replica.configuration.shape.num_gpus >= least_gpus


@settings(max_examples=6, deadline=None)
@given(st.permutations(range(4)))
def test_relabelling_equal_gpus_changes_nothing(order):
    machines = [("A100-40", "r", 4), ("A100-40", "r", 4), ("L40S", "r", 4), ("L40S", "r", 4)]
    costs = {
        make_plan(
            paper_cluster([machines[i] for i in labels]),
            JOB,
            "areal-hex",
            CostModel.calibrated(),
            Budget(evaluations=60),
        ).iteration_s
        for labels in (range(4), order)
    }
    assert len({round(cost, 9) for cost in costs}) == 1


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=4), st.booleans(), st.data())
def test_split_objective_ignores_labels(kinds, mean_bandwidth, data):
    cluster = paper_cluster([(kind, "r", 4) for kind in kinds])
    order = data.draw(st.permutations(range(len(kinds))))
    other = paper_cluster([(kinds[i], "r", 4) for i in order])
    tables = [SplitTable(c.view, machine_classes(c.view), mean_bandwidth=mean_bandwidth) for c in (cluster, other)]
    rows = np.array([data.draw(st.lists(st.integers(0, 4), min_size=len(kinds), max_size=len(kinds)))])
    assert tables[0].objective(rows)[0] == pytest.approx(tables[1].objective(rows[:, list(order)])[0])


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 4))
def test_plan_uses_every_gpu_for_one_side_only(kind, first, second):
    cluster = paper_cluster([("A100-40", "r", 4), (kind, "r", first), ("A100-40", "s", second)])
    plan = make_plan(cluster, JOB, ArealHexPlanner(), CostModel.calibrated(), Budget(evaluations=20)).plan
    generating = set(plan.tasks[RlTask.ACTOR_GENERATION].gpus)
    assert all(not generating & set(p.gpus) for t, p in plan.tasks.items() if t is not RlTask.ACTOR_GENERATION)
