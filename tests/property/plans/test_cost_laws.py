"""Laws of the cost model, on random clusters' plans (style: every law states what must hold for any plan)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.cost import CompactPlan, CostModel, Evaluation, PlanEvaluator, compact_of, plan_of, price
from plans.cost.calibration import Calibration, GpuEfficiency
from plans.cost.group_memory import MemoryPricer
from plans.plan import check_plan
from plans.plan_load import load_plan
from plans.spec.cluster import Cluster
from plans.spec.load import cluster_from_document
from plans.units import gb_to_bytes
from tests.helpers.planner_cases import paper_cluster, paper_job, random_plan, scaled

MACHINES = [("A100-40", "va", 4), ("L40S", "oh", 4), ("A100-40", "va", 4), ("L4", "fr", 2), ("L4", "pa", 2)]
CLUSTER = paper_cluster(MACHINES)
JOBS = [paper_job("qwen3-1.7b", mode=mode, algorithm=algorithm, prompts=16, responses=4)
        for mode in ("sync", "async") for algorithm in ("ppo", "grpo")]  # fmt: skip
MODELS = [CostModel.paper(), CostModel.calibrated()]
seeds = st.integers(0, 2**32 - 1)
jobs = st.sampled_from(JOBS)
models = st.sampled_from(MODELS)


def barred(cluster: Cluster, *regions: str) -> Cluster:
    """Return the cluster with the link between two regions forbidden."""
    document = cluster.model_dump(mode="json", exclude_none=True)
    links = [link for link in document["links"]["regions"] if set(link["between"]) != set(regions)]
    document["links"]["regions"] = [*links, {"between": list(regions), "forbidden": True}]
    return cluster_from_document(document, "barred")


BARRED = barred(CLUSTER, "oh", "fr")


def times(evaluation: Evaluation) -> list[float]:
    return [evaluation.iteration_s, *evaluation.task_s.values()]


@settings(max_examples=150, deadline=None)
@given(seed=seeds, job=jobs, model=models)
def test_evaluator_and_price_give_the_same_numbers(seed, job, model):
    compact = random_plan(CLUSTER, job, np.random.default_rng(seed))
    fast = PlanEvaluator(CLUSTER, job, model).evaluate(compact)
    report = price(CLUSTER, job, plan_of(compact, CLUSTER, job, method="random"), model)
    assert report.iteration_s == pytest.approx(fast.iteration_s, rel=1e-12)
    assert [t.total_s for t in report.tasks.values()] == pytest.approx(list(fast.task_s.values()), rel=1e-12)
    assert report.phases.model_dump() == pytest.approx(
        {key: getattr(fast.phases, key) for key in report.phases.model_dump()}, rel=1e-12, abs=1e-15
    )
    assert (report.feasible, report.decode_batches) == (fast.feasible, fast.decode_batches)


@settings(max_examples=100, deadline=None)
@given(
    seed=seeds,
    mode=st.sampled_from(["sync", "async"]),
    training=st.fixed_dictionaries({
        "sharding": st.sampled_from(["none", "full"]),
        "distributed_optimizer": st.booleans(),
        "precision": st.sampled_from(["fp32", "bf16", "bf16-mixed"]),
        "recompute": st.sampled_from(["none", "full"]),
    }),
)  # fmt: skip
def test_memory_of_searches_is_that_of_the_ledger_however_training_shares_its_bytes(seed, mode, training):
    job = paper_job("qwen3-1.7b", mode=mode, prompts=16, responses=4, training=training)
    compact = random_plan(CLUSTER, job, np.random.default_rng(seed))
    pricer = MemoryPricer(CLUSTER.view, job)
    need = sum(pricer.group_memory(group, compact.tasks).need_bytes for group in compact.groups)
    report = price(CLUSTER, job, plan_of(compact, CLUSTER, job, method="random"), CostModel.paper())
    assert gb_to_bytes(sum(gpu.model_gb + gpu.working_gb for gpu in report.memory.values())) == pytest.approx(need)


@settings(max_examples=80, deadline=None)
@given(seed=seeds, job=jobs, model=models)
def test_evaluator_and_price_agree_where_a_link_is_forbidden(seed, job, model):
    """Rings that go round the link, rings that can't, pipelines over it, weights that can't cross it."""
    compact = random_plan(BARRED, job, np.random.default_rng(seed))
    fast = PlanEvaluator(BARRED, job, model).evaluate(compact)
    report = price(BARRED, job, plan_of(compact, BARRED, job, method="random"), model)
    expected = [np.inf if cost is None else cost.total_s for cost in report.tasks.values()]
    assert list(fast.task_s.values()) == pytest.approx(expected, rel=1e-12)
    iteration_s = np.inf if report.iteration_s is None else report.iteration_s
    assert fast.iteration_s == pytest.approx(iteration_s, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, job=jobs, model=models)
def test_a_warm_evaluator_gives_the_numbers_of_a_fresh_one(seed, job, model):
    rng = np.random.default_rng(seed)
    warm = PlanEvaluator(CLUSTER, job, model)
    plans = [random_plan(CLUSTER, job, rng) for _ in range(5)]
    mixed = [CompactPlan(p.groups, p.tasks) for p in (*plans, *reversed(plans))]
    assert [warm.evaluate(p) for p in mixed] == [PlanEvaluator(CLUSTER, job, model).evaluate(p) for p in mixed]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, job=jobs, model=models)
def test_relabelling_interchangeable_gpus_leaves_every_cost_unchanged(seed, job, model):
    rng = np.random.default_rng(seed)
    compact = random_plan(CLUSTER, job, rng)
    relabel = np.arange(CLUSTER.view.num_gpus)
    for machine in range(len(MACHINES)):
        members = np.flatnonzero(CLUSTER.view.machine_of == machine)
        relabel[members] = rng.permutation(members)
    moved = CompactPlan(compact.groups, {t: replace(c, gpus=relabel[c.gpus]) for t, c in compact.tasks.items()})
    evaluator = PlanEvaluator(CLUSTER, job, model)
    before, after = evaluator.evaluate(compact), evaluator.evaluate(moved)
    assert times(after) == pytest.approx(times(before), rel=1e-12)
    assert after.overflow_bytes == pytest.approx(before.overflow_bytes, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, job=jobs, factor=st.sampled_from([0.5, 2.0, 3.0, 10.0]), is_paper=st.booleans())
def test_scaling_every_rate_divides_every_time(seed, job, factor, is_paper):
    ideal = Calibration(name="no overhead", default=GpuEfficiency(decode_layer_overhead_s=0.0))
    model = CostModel.paper() if is_paper else CostModel.calibrated(ideal)
    compact = random_plan(CLUSTER, job, np.random.default_rng(seed))
    base = PlanEvaluator(scaled(CLUSTER, 1.0), job, model).evaluate(compact)
    fast = PlanEvaluator(scaled(CLUSTER, factor), job, model).evaluate(compact)
    assert times(fast) == pytest.approx([seconds / factor for seconds in times(base)], rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, job=jobs, model=models, what=st.sampled_from(["gpu", "links"]))
def test_faster_hardware_never_raises_the_cost_of_a_plan(seed, job, model, what):
    compact = random_plan(CLUSTER, job, np.random.default_rng(seed))
    base = PlanEvaluator(scaled(CLUSTER, 1.0, latency=10.0), job, model).evaluate(compact)
    fast = PlanEvaluator(scaled(CLUSTER, 1.7, what=what, latency=10.0), job, model).evaluate(compact)
    closer = PlanEvaluator(scaled(CLUSTER, 1.0, latency=5.0), job, model).evaluate(compact)
    for better in (fast, closer):
        assert all(b <= a * (1 + 1e-12) for a, b in zip(times(base), times(better), strict=True))


@settings(max_examples=60, deadline=None)
@given(seed=seeds, job=jobs)
def test_plan_documents_round_trip_and_pass_the_check(seed, job):
    compact = random_plan(CLUSTER, job, np.random.default_rng(seed))
    plan = plan_of(compact, CLUSTER, job, method="random")
    check_plan(plan, CLUSTER, job)
    again = load_plan(plan.to_json(), "plan.json")
    assert (again, again.to_json(), again.fingerprint) == (plan, plan.to_json(), plan.fingerprint)
    back = compact_of(again, CLUSTER)
    assert (back.groups, {t: c.key for t, c in back.tasks.items()}) == (
        compact.groups,
        {t: c.key for t, c in compact.tasks.items()},
    )


@settings(max_examples=60, deadline=None)
@given(seed=seeds, job=jobs)
def test_phases_and_task_costs_bound_the_iteration(seed, job):
    compact = random_plan(CLUSTER, job, np.random.default_rng(seed))
    evaluation = PlanEvaluator(CLUSTER, job, CostModel.paper()).evaluate(compact)
    assert max(evaluation.task_s.values()) <= evaluation.iteration_s
    assert evaluation.iteration_s <= sum(evaluation.task_s.values()) + evaluation.phases.transfer_s + 1e-9
