"""The longest response of a batch: expected, and by a share of batches."""

import json

import numpy as np
import pytest

from plans.cost import CostModel, load_calibration, price
from plans.cost.lengths import LengthMoments, moments_of
from plans.errors import SpecError
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.spec.job import Lengths
from tests.helpers.planner_cases import paper_cluster, paper_job

SPREAD = {"response_mean": 400.0, "response_std": 300.0}
MOMENTS = LengthMoments(prompt=10.0, response=400.0, response_std=300.0, response_max=1e9)


def with_tail(tail):
    return moments_of(Lengths(prompt=10, response=1_000_000, **SPREAD), tail)


@pytest.mark.parametrize("num", [1, 8, 200])
def test_p95_is_the_length_that_one_batch_in_twenty_exceeds(num):
    variance = np.log1p((300.0 / 400.0) ** 2)
    drawn = np.random.default_rng(3).lognormal(np.log(400.0) - variance / 2, np.sqrt(variance), (20_000, num))
    exceeded = (drawn.max(axis=1) > with_tail(0.95).longest_of(num)).mean()
    assert exceeded == pytest.approx(0.05, abs=0.01)


def test_expected_longest_lies_below_the_p95_and_both_are_cut_at_the_maximum():
    for num in (1, 16, 512):
        assert MOMENTS.response <= MOMENTS.longest_of(num) < with_tail(0.95).longest_of(num)
    short = moments_of(Lengths(prompt=10, response=500, **SPREAD), 0.95)
    assert short.longest_of(512) == 500.0


def test_equal_lengths_have_no_tail():
    assert moments_of(Lengths(prompt=10, response=500), 0.95).longest_of(64) == 500.0


def test_tail_of_a_calibration_lengthens_generation_only():
    cluster = paper_cluster([("A100-40", "r", 4)])
    job = paper_job("qwen3-1.7b", algorithm="grpo", mode="async", prompts=24)
    job = job.model_copy(update={"lengths": Lengths(prompt=1024, response=4096, response_mean=1024, response_std=700)})
    plan = make_plan(cluster, job, "verl", CostModel.calibrated(), Budget(evaluations=30)).plan
    p95 = load_calibration(json.dumps({"format": "motley.calibration/1", "tail": 0.95}), "c.json")
    expected, longer = (
        price(cluster, job, plan, model) for model in (CostModel.calibrated(), CostModel.calibrated(p95))
    )
    assert longer.phases.generation_s > expected.phases.generation_s
    assert longer.phases.training_s == expected.phases.training_s


@pytest.mark.parametrize("tail", [0.0, 1.0, -0.5, 2.0])
def test_tail_is_a_share(tail):
    with pytest.raises(SpecError, match="tail"):
        load_calibration(json.dumps({"format": "motley.calibration/1", "tail": tail}), "c.json")
