"""Balanced shares and their use in pricing."""

import numpy as np
import pytest

from plans.cost import CostModel
from plans.cost.evaluator import PlanEvaluator
from plans.search.balancing import Balancing, TaskRates, share_samples
from plans.search.genome import Genome
from plans.search.layouts import LayerSplit, TaskLayout
from plans.search.pricing import Pricer
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_cluster, paper_job


def test_shared_samples_follow_speed():
    assert share_samples(30, [1.0, 2.0]) == (20, 10)
    assert share_samples(3, [1.0, 1000.0, 1.0]) == (1, 1, 1)
    assert share_samples(10, [1.0, 1e9, 1e9]) == (8, 1, 1)


def test_layers_go_to_the_faster_stage():
    cluster = paper_cluster([("A100-40", "a", 1), ("L4", "a", 1)])
    evaluator = PlanEvaluator(cluster, paper_job("qwen3-0.6b"), CostModel.paper())
    rates = TaskRates(evaluator, RlTask.REWARD_INFERENCE, 1)
    grid = np.array([[[0], [1]]], dtype=np.int32)
    assert rates.layers(grid, LayerSplit.EVEN) == (14, 14)
    assert rates.layers(grid, LayerSplit.SPEED) == (20, 8)
    assert rates.layers(grid, LayerSplit.MEMORY) == (18, 10)


def test_layers_respect_memory_caps():
    cluster = paper_cluster([("A100-40", "a", 1), ("L40S", "a", 1)])
    evaluator = PlanEvaluator(cluster, paper_job("qwen3-4b", algorithm="grpo"), CostModel.paper())
    rates = TaskRates(evaluator, RlTask.ACTOR_TRAINING, 1)
    layers = rates.layers(np.array([[[0], [1]]], dtype=np.int32), LayerSplit.SPEED)
    assert layers is not None
    assert sum(layers) == 36
    assert rates.resident_share(np.array([[[0], [1]]], dtype=np.int32), layers) <= 1.0


def test_the_stage_with_the_vocabulary_head_gets_fewer_layers_when_calibrated():
    # Per sample of 2,048 tokens a layer has 2 * 2048 * 15.7 million plus 2 * 2048^2 * 16 * 128 FLOP = 0.082e12, the
    # head 2 * 2048 * 1024 * 151936 = 0.637e12: as much as 7.8 layers, so 28 layers are cut at 18 | 10.
    cluster = paper_cluster([("A100-40", "a", 2)])
    grid = np.array([[[0], [1]]], dtype=np.int32)
    job = paper_job("qwen3-0.6b")
    calibrated = PlanEvaluator(cluster, job, CostModel.calibrated())
    assert TaskRates(calibrated, RlTask.REFERENCE_INFERENCE, 1).layers(grid, LayerSplit.SPEED) == (18, 10)
    assert TaskRates(calibrated, RlTask.REWARD_INFERENCE, 1).layers(grid, LayerSplit.SPEED) == (14, 14)
    paper = PlanEvaluator(cluster, job, CostModel.paper())
    assert TaskRates(paper, RlTask.REFERENCE_INFERENCE, 1).layers(grid, LayerSplit.SPEED) == (14, 14)


@pytest.mark.parametrize("model", [CostModel.paper(), CostModel.calibrated()])
def test_balancing_never_costs_time_on_unlike_replicas(model):
    cluster = paper_cluster([("A100-40", "a", 2), ("L40S", "a", 2)])
    job = paper_job("qwen3-0.6b", algorithm="grpo")
    layout = TaskLayout(4, 1, 1, (0, 1, 2, 3))
    tasks = (
        RlTask.ACTOR_GENERATION,
        RlTask.REWARD_INFERENCE,
        RlTask.REFERENCE_INFERENCE,
        RlTask.ACTOR_TRAINING,
    )
    genome = Genome((tasks,), ((0, 1, 2, 3),), dict.fromkeys(tasks, layout))
    even = Pricer(PlanEvaluator(cluster, job, model), Balancing.none()).price(genome)
    balanced = Pricer(PlanEvaluator(cluster, job, model), Balancing()).price(genome)
    assert balanced.score_s < even.score_s
