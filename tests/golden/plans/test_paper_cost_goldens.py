"""Golden numbers of the published formulas (hetrl.md 4.7), to six digits."""

from __future__ import annotations

import numpy as np
import pytest

from plans.cost import CostModel, PlanEvaluator, plan_of, price
from plans.cost.compact import CompactPlan
from plans.cost.flops import paper_layer_flop
from plans.cost.iteration import phi
from plans.spec.llm import BUILT_IN_SHAPES
from plans.workflow import RlTask, workflow_of
from tests.helpers.planner_cases import cost_of, hand_task, paper_cluster, paper_job

DIGITS = 1e-6


def test_training_dp3_tp8_equals_the_golden_row() -> None:
    cluster = paper_cluster([("A100-40", "va", 8)] * 3)
    evaluator = PlanEvaluator(cluster, paper_job(), CostModel.paper())
    placement = hand_task(np.arange(24).reshape(3, 1, 8), [36], [1024] * 3)
    cost = cost_of(evaluator, RlTask.ACTOR_TRAINING, placement)
    golden = {"total_s": 53.502883, "comp_s": 42.62722, "hbm_s": 0.0, "tp_s": 10.823318, "pp_s": 0.0, "dp_s": 0.052345,
         "bubble_s": 0.0}  # fmt: skip
    assert {name: getattr(cost, name) for name in golden} == pytest.approx(golden, rel=DIGITS, abs=5e-7)


def test_generation_dp12_tp2_equals_the_golden_row() -> None:
    cluster = paper_cluster([("A100-40", "va", 8)] * 3)
    evaluator = PlanEvaluator(cluster, paper_job(), CostModel.paper())
    placement = hand_task(np.arange(24).reshape(12, 1, 2), [36], [256] * 12)
    cost = cost_of(evaluator, RlTask.ACTOR_GENERATION, placement, (256,) * 12)
    golden = {"total_s": 11.309396, "comp_s": 6.850803, "hbm_s": 3.943197, "tp_s": 0.515396, "pp_s": 0.0, "dp_s": 0.0,
         "bubble_s": 0.0}  # fmt: skip
    assert {name: getattr(cost, name) for name in golden} == pytest.approx(golden, rel=DIGITS, abs=5e-7)


def test_price_of_the_golden_placements_adds_the_phases_up() -> None:
    cluster = paper_cluster([("A100-40", "va", 8)] * 3, memory_scale=4.0)
    job = paper_job(algorithm="grpo")
    training = hand_task(np.arange(24).reshape(3, 1, 8), [36], [1024] * 3)
    tasks = workflow_of(job).tasks
    placed = dict.fromkeys(tasks, training) | {
        RlTask.ACTOR_GENERATION: hand_task(np.arange(24).reshape(12, 1, 2), [36], [256] * 12)
    }
    plan = plan_of(CompactPlan((tasks,), placed), cluster, job, method="hand")
    report = price(cluster, job, plan, CostModel.paper())
    # Inference on DP3 TP8: a third of the training compute and of its all-reduces (a = 2 of 6), twice (reward, ref).
    inference = 2 * (42.62722 / 3 + 10.823318 / 3)
    assert report.phases is not None
    assert report.iteration_s is not None
    assert report.phases.inference_s == pytest.approx(inference, rel=DIGITS)
    assert report.iteration_s == pytest.approx(11.309396 + inference + 53.502883 + report.phases.transfer_s, rel=DIGITS)
    assert report.throughput_samples_s == pytest.approx(3072 / report.iteration_s, rel=1e-12)


@pytest.mark.parametrize(("name", "tflop"), [("qwen3-4b", 16.428), ("qwen3-8b", 34.635), ("qwen3-14b", 64.425)])
def test_forward_flop_per_sample_equals_the_published_sizes(name: str, tflop: float) -> None:
    shape = BUILT_IN_SHAPES[name]
    assert shape.layers * paper_layer_flop(shape, 2048) / 1e12 == pytest.approx(tflop, abs=5e-4)


@pytest.mark.parametrize(("name", "gigabytes"), [("qwen3-4b", 7.267), ("qwen3-8b", 15.703), ("qwen3-14b", 29.780)])
def test_weight_bytes_by_the_paper_equal_the_published_sizes(name: str, gigabytes: float) -> None:
    shape = BUILT_IN_SHAPES[name]
    assert 2 * shape.layers * shape.paper_layer_parameters / 1e9 == pytest.approx(gigabytes, abs=5e-4)


@pytest.mark.parametrize(("eta", "seconds"), [(0.0, 6.0), (0.5, 4.5), (1.0, 3.0)])
def test_phi_of_3_2_1_equals_the_golden_values(eta: float, seconds: float) -> None:
    assert phi([(0, 3.0), (1, 2.0), (2, 1.0)], eta) == seconds


@pytest.mark.parametrize(("gpu", "decode_s", "prefill_s"),
                         [("A100-40", 7.9, 0.054), ("L40S", 18.6, 0.046), ("L4", 53.6, 0.138)])  # fmt: skip
def test_decode_and_prefill_of_one_wave_equal_the_golden_values(gpu: str, decode_s: float, prefill_s: float) -> None:
    cluster = paper_cluster([(gpu, "va", 1)])
    evaluator = PlanEvaluator(cluster, paper_job(prompts=1, responses=1), CostModel.paper())
    cost = cost_of(evaluator, RlTask.ACTOR_GENERATION, hand_task([[[0]]], [36], [1]), (1,))
    assert (cost.hbm_s, cost.comp_s) == (pytest.approx(decode_s, abs=0.05), pytest.approx(prefill_s, abs=5e-4))


@pytest.mark.parametrize(("name", "gigabytes"), [("qwen3-4b", 169), ("qwen3-8b", 344), ("qwen3-14b", 620)])
def test_colocated_ppo_models_need_42_bytes_per_parameter(name: str, gigabytes: float) -> None:
    # 18 + 18 (training) + 2 + 2 (reward, reference) + 2 (generation's own copy, other degrees than training).
    cluster = paper_cluster([("A100-40", "va", 8)] * 3)
    job = paper_job(name)
    tasks = workflow_of(job).tasks
    layers = BUILT_IN_SHAPES[name].layers
    training = hand_task(np.arange(8).reshape(1, 1, 8), [layers], [3072])
    generation = hand_task(np.arange(8).reshape(2, 1, 4), [layers], [1536, 1536])
    placed = dict.fromkeys(tasks, training) | {RlTask.ACTOR_GENERATION: generation}
    plan = plan_of(CompactPlan((tasks,), placed), cluster, job, method="hand")
    report = price(cluster, job, plan, CostModel.paper())
    # Generation is replicated twice here, so its copy counts once more; scalar heads save vocabulary matrices.
    shape = BUILT_IN_SHAPES[name]
    measured = sum(entry.model_gb for entry in report.memory.values())
    extra_copy = 2 * shape.parameters / 1e9
    head_saved = 0 if shape.tied else (18 + 2) * shape.embedding_parameters / 1e9
    assert measured - extra_copy + head_saved == pytest.approx(gigabytes, rel=3e-3)
