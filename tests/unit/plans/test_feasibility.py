"""Why a job does not fit."""

from __future__ import annotations

import pytest

from plans.cost import CostModel, plan_of, price
from plans.errors import MemoryInfeasibleError, TooFewGpusError
from plans.feasibility import cheapest_change, find_fitting_plan, infeasible_error, require_fit
from tests.helpers.planner_cases import paper_cluster, paper_job


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_fitting_plan_really_fits(mode: str) -> None:
    cluster, job = paper_cluster([("A100-40", "va", 8), ("L4", "va", 8)]), paper_job("qwen3-4b", mode=mode)
    plan = plan_of(require_fit(cluster, job), cluster, job, method="lean")
    assert price(cluster, job, plan, CostModel.paper()).violations == ()


def test_shortfall_names_need_have_and_the_cheapest_gpus() -> None:
    cluster, job = paper_cluster([("L4", "va", 2)]), paper_job("qwen3-4b")
    sentence = r"needs .* GB on 1 GPUs that have 22\.8 GB.*the cheapest change found: add 6 x L4 \(for 4\.80 \$/h\)\.$"
    with pytest.raises(MemoryInfeasibleError, match=sentence) as caught:
        require_fit(cluster, job)
    assert sum(shortfall.lacking_gb for shortfall in caught.value.shortfalls) > 0


def test_the_cheapest_change_fits_and_one_gpu_less_does_not() -> None:
    cluster, job = paper_cluster([("L4", "va", 2)]), paper_job("qwen3-4b")
    change = cheapest_change(cluster, job)
    assert change is not None
    assert find_fitting_plan(change.cluster, change.job) is not None
    assert change.cluster.view.num_gpus == 8
    assert find_fitting_plan(paper_cluster([("L4", "va", 7)]), job) is None


def test_a_setting_is_preferred_to_more_gpus() -> None:
    cluster = paper_cluster([("A100-40", "va", 2)])
    job = paper_job("qwen3-1.7b", algorithm="grpo", training={"recompute": "none", "micro_batch_size": 8})
    change = cheapest_change(cluster, job)
    assert change is not None
    assert (change.text, change.usd_per_hour) == ("set training.recompute: full", 0.0)


def test_a_setting_that_changes_numerics_comes_with_the_gpus_that_spare_it() -> None:
    cluster, job = paper_cluster([("A100-40", "va", 1)]), paper_job("qwen3-1.7b", algorithm="grpo")
    sentence = r"set training\.precision: bf16 \(.*numerics\), or add [0-9]+ x A100-40 \(for [0-9.]+ \$/h\)\.$"
    with pytest.raises(MemoryInfeasibleError, match=sentence):
        require_fit(cluster, job)


def test_async_on_one_gpu_has_too_few() -> None:
    error = infeasible_error(paper_cluster([("L4", "va", 1)]), paper_job("qwen3-0.6b", algorithm="grpo", mode="async"))
    assert isinstance(error, TooFewGpusError)
    assert "needs at least 2 GPUs" in str(error)
