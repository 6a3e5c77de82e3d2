"""The price document."""

from __future__ import annotations

import json

import numpy as np
import pytest

from plans.cost import CompactPlan, CostModel, collectives, plan_of, price
from plans.cost.collectives import RingSolution
from plans.errors import PlanMismatchError
from plans.plan import Plan
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.spec.load import cluster_from_document
from plans.workflow import RlTask, workflow_of
from tests.helpers.planner_cases import hand_task, paper_cluster, paper_job


def everything_on(cluster: Cluster, job: Job, grid: object, layers: list[int], samples: list[int]) -> Plan:
    tasks = workflow_of(job).tasks
    placed = dict.fromkeys(tasks, hand_task(grid, layers, samples))
    return plan_of(CompactPlan((tasks,), placed), cluster, job, method="hand")


def test_document_has_exactly_the_contract_fields_and_additions() -> None:
    cluster, job = paper_cluster([("A100-40", "va", 8)], memory_scale=10), paper_job("qwen3-4b", algorithm="grpo")
    report = price(cluster, job, everything_on(cluster, job, np.arange(8).reshape(2, 1, 4), [36], [1536] * 2),
                   CostModel.paper())  # fmt: skip
    document = json.loads(report.to_json())
    assert list(document) == [
        "iteration_s", "throughput_samples_s", "throughput_tokens_s", "usd_per_hour", "usd_per_million_tokens",
        "phases", "tasks", "memory", "feasible", "violations", "model", "bottlenecks", "decode_batches",
        "free_overlap_s", "rings_proved"]  # fmt: skip
    assert list(document["phases"]) == ["generation_s", "inference_s", "training_s", "transfer_s"]
    assert list(document["tasks"]["actor_training"]) == [
        "total_s", "comp_s", "hbm_s", "tp_s", "pp_s", "dp_s", "bubble_s"]  # fmt: skip
    assert list(document["memory"]["m0/0"]) == ["model_gb", "working_gb", "capacity_gb"]
    assert (document["feasible"], document["violations"], document["decode_batches"]) == (True, [], [256, 256])


def test_money_and_tokens_follow_from_the_iteration() -> None:
    cluster, job = paper_cluster([("A100-40", "va", 8)], memory_scale=10), paper_job("qwen3-4b", algorithm="grpo")
    plan = everything_on(cluster, job, np.arange(4).reshape(1, 1, 4), [36], [3072])
    report = price(cluster, job, plan, CostModel.paper())
    assert report.iteration_s is not None
    assert report.usd_per_hour == pytest.approx(4 * 4.1)
    assert report.throughput_tokens_s == pytest.approx(3072 * 2048 / report.iteration_s)
    assert report.usd_per_million_tokens == pytest.approx(16.4 / 3600 / report.throughput_tokens_s * 1e6)


def test_too_little_memory_is_reported_for_each_gpu() -> None:
    cluster, job = paper_cluster([("L4", "va", 2)]), paper_job("qwen3-8b", algorithm="grpo")
    plan = everything_on(cluster, job, np.arange(2).reshape(1, 1, 2), [36], [3072])
    report = price(cluster, job, plan, CostModel.paper())
    assert not report.feasible
    assert [sentence.split()[0] for sentence in report.violations[:2]] == ["m0/0", "m0/1"]
    assert report.violations[2] == "actor_generation replica 0 has no memory for one full-length sequence"


def test_forbidden_link_gives_no_number_and_a_violation() -> None:
    base = paper_cluster([("A100-40", "va", 1), ("A100-40", "oh", 1)], memory_scale=10)
    document = base.model_dump(mode="json", exclude_none=True)
    document["links"]["regions"] = [{"between": ["va", "oh"], "forbidden": True}]
    cluster, job = cluster_from_document(document, "case"), paper_job("qwen3-0.6b", algorithm="grpo")
    report = price(cluster, job, everything_on(cluster, job, [[[0, 1]]], [28], [3072]), CostModel.paper())
    assert (report.iteration_s, report.phases, report.feasible) == (None, None, False)
    assert report.violations[0] == "actor_generation needs a link that is forbidden"
    assert json.loads(report.to_json())["tasks"]["actor_training"] is None


def test_asked_decode_batch_beyond_memory_is_a_violation() -> None:
    cluster, job = paper_cluster([("A100-40", "va", 8)], memory_scale=0.75), paper_job("qwen3-8b", algorithm="grpo")
    plan = everything_on(cluster, job, np.arange(8).reshape(1, 1, 8), [36], [3072])
    derived = price(cluster, job, plan, CostModel.paper())
    compact = CompactPlan((workflow_of(job).tasks,), dict.fromkeys(
        workflow_of(job).tasks, hand_task(np.arange(8).reshape(1, 1, 8), [36], [3072])))  # fmt: skip
    asking = plan_of(compact, cluster, job, method="hand", decode_batches=[256])
    report = price(cluster, job, asking, CostModel.paper())
    assert derived.feasible
    assert derived.decode_batches[0] < 256
    assert report.violations[-1] == (
        f"actor_generation replica 0 asks for a decode batch of 256, but {derived.decode_batches[0]} fit"
    )


def test_plan_of_another_cluster_is_refused() -> None:
    cluster, job = paper_cluster([("A100-40", "va", 8)]), paper_job("qwen3-4b", algorithm="grpo")
    other = paper_cluster([("A100-40", "va", 9)])
    plan = everything_on(cluster, job, np.arange(8).reshape(1, 1, 8), [36], [3072])
    with pytest.raises(PlanMismatchError, match="the plan was made for another cluster"):
        price(other, job, plan, CostModel.paper())


def test_calibrated_price_is_dearer_than_the_paper_price() -> None:
    cluster, job = paper_cluster([("A100-40", "va", 8)], memory_scale=10), paper_job("qwen3-8b")
    plan = everything_on(cluster, job, np.arange(8).reshape(2, 1, 4), [36], [1536] * 2)
    paper, calibrated = (price(cluster, job, plan, m) for m in (CostModel.paper(), CostModel.calibrated()))
    for task in RlTask:
        cheap, dear = paper.tasks[task], calibrated.tasks[task]
        assert cheap is not None
        assert dear is not None
        assert dear.total_s > cheap.total_s


def test_a_ring_whose_order_is_not_proved_best_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = paper_cluster([("A100-40", region, 2) for region in ("oh", "pa", "sp", "va")], memory_scale=10)
    job = paper_job("qwen3-4b", algorithm="grpo")
    plan = everything_on(cluster, job, np.arange(8).reshape(1, 1, 8), [36], [3072])
    assert price(cluster, job, plan, CostModel.paper()).rings_proved
    unproved = RingSolution(1.0, is_proved=False)
    monkeypatch.setattr(collectives, "best_ring", lambda _counts, _cost: unproved)
    assert not price(cluster, job, plan, CostModel.paper()).rings_proved
