"""Length buckets to suited replicas: cut, dealt, planned, and judged by the simulator."""

import itertools
import math
from functools import cache

import numpy as np
import pytest

from plans.cost import CostModel
from plans.cost.lengths import LengthMoments
from plans.errors import SpecError
from plans.plan import check_plan
from plans.plan_load import plan_from_document
from plans.search.areal_hex.length_buckets import cut_by_length, deal
from plans.search.areal_hex.planner import ArealHexPlanner
from plans.search.areal_hex.settings import ArealHexSettings
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.simulate import SimulationSettings, simulate
from plans.simulate.iterations import shares_by_length
from plans.simulate.settings import Dispatch
from plans.spec.job import Lengths
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_cluster, paper_job

MODEL = CostModel.calibrated()
MOMENTS = LengthMoments(prompt=100.0, response=1000.0, response_std=900.0, response_max=8000.0)


def test_buckets_hold_every_rollout_once_in_ascending_lengths():
    buckets = cut_by_length(MOMENTS, 103)
    assert sum(bucket.rollouts for bucket in buckets) == 103
    assert max(b.rollouts for b in buckets) - min(b.rollouts for b in buckets) <= 1
    for bucket in buckets:
        assert bucket.shortest <= bucket.mean <= bucket.longest
    for shorter, longer in itertools.pairwise(buckets):
        assert shorter.mean < longer.mean
        assert shorter.longest == pytest.approx(longer.shortest)


def test_mean_of_the_buckets_is_the_mean_of_the_cut_distribution():
    variance = math.log1p(0.9**2)
    drawn = np.random.default_rng(0).lognormal(math.log(1000.0) - variance / 2, math.sqrt(variance), 400_000)
    buckets = cut_by_length(MOMENTS, 800)
    mean = sum(b.rollouts * b.mean for b in buckets) / 800
    assert mean == pytest.approx(np.minimum(drawn, 8000.0).mean(), rel=0.01)


def test_last_bucket_ends_at_the_p95_of_the_longest_rollout():
    free = LengthMoments(prompt=1.0, response=1000.0, response_std=900.0, response_max=1e9)
    variance = math.log1p(0.9**2)
    drawn = np.random.default_rng(1).lognormal(math.log(1000.0) - variance / 2, math.sqrt(variance), (20_000, 64))
    assert (drawn.max(axis=1) > cut_by_length(free, 64)[-1].longest).mean() == pytest.approx(0.05, abs=0.01)


def test_equal_lengths_are_one_bucket_and_few_rollouts_few_buckets():
    equal = LengthMoments(prompt=1.0, response=50.0, response_std=0.0, response_max=50.0)
    assert [(b.rollouts, b.mean, b.longest) for b in cut_by_length(equal, 9)] == [(9, 50.0, 50.0)]
    assert [b.rollouts for b in cut_by_length(MOMENTS, 3)] == [1, 1, 1]


def test_long_rollouts_go_to_fast_steps_and_the_rest_fills_both():
    # The first replica has slow steps and much throughput; on the second a long rollout ends early.
    rates = np.array([[1.0, 4.0], [2.0, 8.0]])
    spans = np.array([[5.0, 100.0], [1.0, 10.0]])
    dealt = deal(rates, spans, [3.0, 1.0], [9, 1])
    # The long one on the second: 10 s to its end, 8 s of work; by then one short one fits in as well.
    assert dealt.counts.tolist() == [[8, 0], [1, 1]]
    assert dealt.seconds == pytest.approx(10.0)


@pytest.mark.parametrize("seed", range(6))
def test_dealt_rollouts_are_all_and_no_slower_than_any_cut_along_the_lengths(seed):
    """Brute force over the cuts: replicas in the order of their steps take consecutive rollouts, longest first."""
    rng = np.random.default_rng(seed)
    steps = np.sort(rng.uniform(1.0, 4.0, 3))
    means, sizes = np.array([1.0, 2.0, 5.0]), [4, 4, 4]
    rates = rng.uniform(0.5, 1.0, 3)[:, None] * means[None, :]
    spans = steps[:, None] * np.array([0.5, 1.0, 4.0])[None, :]
    dealt = deal(rates, spans, steps.tolist(), sizes)
    assert dealt.counts.sum(axis=0).tolist() == sizes

    kinds = [w for w in (2, 1, 0) for _ in range(sizes[w])]
    best = math.inf
    for a, b in itertools.combinations_with_replacement(range(13), 2):
        parts = (kinds[:a], kinds[a:b], kinds[b:])
        times = [
            max(sum(rates[r, w] for w in part), spans[r, part[0]] if part else 0.0) for r, part in enumerate(parts)
        ]
        best = min(best, max(times))
    assert dealt.seconds <= best * (1 + 1e-6)


def mixed_case():
    cluster = paper_cluster([("A100-40", "r", 4), ("L40S", "r", 4), ("L40S", "r", 4)])
    job = paper_job("qwen3-1.7b", algorithm="grpo", mode="async", prompts=384)
    spread = Lengths(prompt=512, response=8192, response_mean=1500, response_std=1500)
    return cluster, job.model_copy(update={"lengths": spread})


@cache
def planned(*, length_buckets):
    cluster, job = mixed_case()
    settings = ArealHexSettings(length_buckets=length_buckets, pipelined_rollouts=False)
    return cluster, job, make_plan(cluster, job, ArealHexPlanner(settings), MODEL, Budget(evaluations=30)).plan


def test_plan_with_buckets_is_valid_and_names_the_lengths_of_each_replica():
    cluster, job, plan = planned(length_buckets=True)
    check_plan(plan, cluster, job)
    replicas = plan.tasks[RlTask.ACTOR_GENERATION].replicas
    assert sum(replica.samples for replica in replicas) == job.num_samples
    assert all(1 <= replica.lengths[0] <= replica.lengths[1] <= 8192 for replica in replicas)
    assert plan_from_document(plan.to_document(), "plan") == plan
    assert all(
        replica.lengths is None for replica in planned(length_buckets=False)[2].tasks[RlTask.ACTOR_GENERATION].replicas
    )


def test_lengths_of_another_task_or_upside_down_are_refused():
    cluster, job, plan = planned(length_buckets=True)
    document = plan.to_document()
    document["tasks"]["actor_generation"]["replicas"][0]["lengths"] = [9, 3]
    document["tasks"]["actor_training"]["replicas"][0]["lengths"] = [1, 3]
    with pytest.raises(SpecError) as caught:
        check_plan(plan_from_document(document, "plan"), cluster, job)
    assert [fault.field.split(".")[-1] for fault in caught.value.faults] == ["lengths", "lengths"]


def test_simulator_deals_the_longest_samples_to_the_replica_meant_for_them():
    replicas = planned(length_buckets=True)[2].tasks[RlTask.ACTOR_GENERATION].replicas
    lengths = np.random.default_rng(2).integers(1, 8000, sum(r.samples for r in replicas)).tolist()
    shares = shares_by_length(lengths, replicas)
    assert sorted(itertools.chain(*shares)) == sorted(lengths)
    assert [len(share) for share in shares] == [replica.samples for replica in replicas]
    longest = max(range(len(replicas)), key=lambda i: replicas[i].lengths[1])
    assert max(lengths) in shares[longest]


def makespans(cluster, job, plan, dispatch):
    """Seconds of the generation of each simulated iteration, first start to last end."""
    result = simulate(cluster, job, plan, SimulationSettings(iterations=2, seed=5, dispatch=dispatch))
    spans = {}
    for interval in result.intervals:
        if interval.activity == "actor_generation":
            start, end = spans.get(interval.iteration, (math.inf, 0.0))
            spans[interval.iteration] = min(start, interval.start_s), max(end, interval.end_s)
    return [end - start for start, end in spans.values()]


def test_buckets_shorten_the_simulated_generation_of_a_heavy_tail():
    cluster, job, plain = planned(length_buckets=False)
    bucketed = planned(length_buckets=True)[2]
    without = makespans(cluster, job, plain, Dispatch.PLANNED)
    with_buckets = makespans(cluster, job, bucketed, Dispatch.BUCKETS)
    assert np.mean(with_buckets) < np.mean(without)
