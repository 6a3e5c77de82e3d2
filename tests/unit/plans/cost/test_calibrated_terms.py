"""Corrections of the calibrated model, one by one, with every efficiency at 1."""

from __future__ import annotations

import numpy as np
import pytest

from plans.cost.calibration import Calibration, ComputeEfficiency, GpuEfficiency, LinkEfficiency, load_calibration
from plans.cost.evaluator import PlanEvaluator
from plans.cost.lengths import LengthMoments, moments_of
from plans.cost.model import CostModel
from plans.errors import SpecError
from plans.spec.job import Lengths
from plans.workflow import RlTask
from tests.helpers.planner_cases import cost_of, hand_task, paper_cluster, paper_job

IDEAL = Calibration(
    name="ideal",
    default=GpuEfficiency(
        compute=ComputeEfficiency(generation=1, inference=1, training=1), hbm=1, decode_layer_overhead_s=0
    ),
    links=LinkEfficiency(within_machine=1, between_machines=1),
)
SHAPE = {"layers": 2, "hidden": 1000, "intermediate": 2000, "heads": 10, "kv_heads": 2, "head_dim": 100, "vocab": 5000,
         "tied": False}  # fmt: skip
# By hand: attention 1000*100*(20 + 4) = 2.4e6, MLP 6e6 weights; s = 1000: 2*1000*8.4e6 + 2*1e6*1000 = 18.8e9 FLOP.


def evaluator(machines: list[tuple[str, str, int]] | None = None, **changes: object) -> PlanEvaluator:
    job = paper_job(SHAPE, prompts=8, responses=1, prompt=500, response=500, **changes)
    return PlanEvaluator(paper_cluster(machines or [("A100-40", "va", 4)]), job, CostModel.calibrated(IDEAL))


def test_training_counts_grouped_queries_causality_recompute_and_the_head() -> None:
    cost = cost_of(evaluator(), RlTask.ACTOR_TRAINING, hand_task([[[0]]], [2], [8]))
    assert cost.comp_s == pytest.approx(4 * 8 * (2 * 18.8e9 + 2 * 1000 * 1000 * 5000) / 312e12)


def test_critic_has_no_vocabulary_head() -> None:
    cost = cost_of(evaluator(), RlTask.CRITIC_INFERENCE, hand_task([[[0]]], [2], [8]))
    assert cost.comp_s == pytest.approx(8 * 2 * 18.8e9 / 312e12)


def test_training_without_recompute_is_three_forwards() -> None:
    changed = evaluator(training={"recompute": "none"})
    full = cost_of(evaluator(), RlTask.ACTOR_TRAINING, hand_task([[[0]]], [2], [8]))
    none = cost_of(changed, RlTask.ACTOR_TRAINING, hand_task([[[0]]], [2], [8]))
    assert none.comp_s == pytest.approx(full.comp_s * 3 / 4)


def test_gradient_ring_is_paid_once_per_update() -> None:
    placement = hand_task([[[0]], [[1]]], [2], [4, 4])
    once = cost_of(evaluator(), RlTask.ACTOR_TRAINING, placement)
    thrice = cost_of(evaluator(training={"updates_per_iteration": 3}), RlTask.ACTOR_TRAINING, placement)
    layer = 2 * (8.4e6 + 2000)
    assert once.dp_s == pytest.approx((2 * layer + 2 * 2 * 5000 * 1000) * 2 * 1 / 2 / 600e9)
    assert thrice.dp_s == pytest.approx(3 * once.dp_s)


def test_shards_and_stages_on_the_same_machines_share_the_link() -> None:
    """Layers of 8.402e6 and two vocabulary matrices of 5e6 weights, two bytes each, cross 0.625e9 bytes/s once.

    Each ring edge carries 2 (2 - 1) / 2 of its shard; with TP = 2 both shards cross, with PP = 2 both stages.
    """
    machines = [("A100-40", "va", 2), ("A100-40", "oh", 2)]
    whole = 0.02 + 2 * (2 * 8.402e6 + 2 * 5e6) / 0.625e9
    tensor = cost_of(evaluator(machines), RlTask.ACTOR_TRAINING, hand_task([[[0, 1]], [[2, 3]]], [2], [4, 4]))
    stages = cost_of(evaluator(machines), RlTask.ACTOR_TRAINING, hand_task([[[0], [1]], [[2], [3]]], [1, 1], [4, 4]))
    assert (tensor.dp_s, stages.dp_s) == pytest.approx((whole, whole))
    apart = evaluator([("A100-40", region, 1) for region in ("va", "oh", "fr", "pa")])
    alone = cost_of(apart, RlTask.ACTOR_TRAINING, hand_task([[[0], [2]], [[1], [3]]], [1, 1], [4, 4]))
    assert alone.dp_s == pytest.approx(0.02 + 2 * (8.402e6 + 5e6) / 0.625e9)


def test_published_formula_gives_each_shard_a_link_of_its_own() -> None:
    job = paper_job(SHAPE, prompts=8, responses=1, prompt=500, response=500)
    cluster = paper_cluster([("A100-40", "va", 2), ("A100-40", "oh", 2)])
    paper = PlanEvaluator(cluster, job, CostModel.paper())
    cost = cost_of(paper, RlTask.ACTOR_TRAINING, hand_task([[[0, 1]], [[2, 3]]], [2], [4, 4]))
    # 4 h1^2 + 3 h1 h2 = 10e6 weights a layer, halved by TP; latency once.
    assert cost.dp_s == pytest.approx(0.01 + 2 * 2 * 10e6 / 2 / 0.625e9)


def test_ring_latency_is_paid_at_every_step() -> None:
    machines = [("A100-40", "va", 1), ("A100-40", "oh", 1)]
    cost = cost_of(evaluator(machines), RlTask.REFERENCE_INFERENCE, hand_task([[[0, 1]]], [2], [8]))
    # 2 all-reduces * 8 micro-batches * 2 layers, each 2 * 10 ms + 2e6 bytes over 0.625e9 bytes/s.
    assert cost.tp_s == pytest.approx(32 * (0.02 + 2e6 / 0.625e9))


def test_inference_pipeline_pays_its_fill() -> None:
    cost = cost_of(evaluator(), RlTask.CRITIC_INFERENCE, hand_task([[[0], [1]]], [1, 1], [8]))
    assert cost.bubble_s == pytest.approx(18.8e9 / 312e12)


def test_decode_step_reads_weights_head_and_cache() -> None:
    cost = cost_of(evaluator(), RlTask.ACTOR_GENERATION, hand_task([[[0]]], [2], [8]), (8,))
    weights = 2 * (2 * (8.4e6 + 2000) + 5000 * 1000)
    cache = 8 * 2 * 750 * 2 * 2 * 100 * 2
    assert cost.hbm_s == pytest.approx(500 * (weights + cache) / 2039e9)


def test_decode_through_two_stages_reads_each_stage_once_per_group() -> None:
    """Two groups of 4 keep both stages busy; a stage reads its layer (and the head) twice, the caches once.

    Layer 8.402e6 weights, head 5e6, two bytes each; cache 8 sequences x 750 tokens x 2 x 2 x 100 x 2 bytes; 500 steps.
    """
    cost = cost_of(evaluator(), RlTask.ACTOR_GENERATION, hand_task([[[0], [1]]], [1, 1], [8]), (8,))
    step_bytes = 2 * (2 * 8.402e6 + 2 * 5e6) + 8 * 750 * 2 * 2 * 100 * 2
    assert cost.hbm_s == pytest.approx(500 * step_bytes / 2039e9)


def test_decode_across_regions_pays_latency_per_token() -> None:
    machines = [("A100-40", "va", 1), ("A100-40", "oh", 1)]
    tensor = cost_of(evaluator(machines), RlTask.ACTOR_GENERATION, hand_task([[[0, 1]]], [2], [8]), (8,))
    pipeline = cost_of(evaluator(machines), RlTask.ACTOR_GENERATION, hand_task([[[0], [1]]], [1, 1], [8]), (8,))
    assert tensor.tp_s > 500 * 2 * 2 * 0.02
    assert pipeline.pp_s > 500 * 0.01


def test_length_distribution_shortens_waves_and_adds_a_tail() -> None:
    moments = moments_of(Lengths(prompt=500, response=500, response_mean=200, response_std=100))
    assert moments == LengthMoments(prompt=500.0, response=200.0, response_std=100.0, response_max=500.0)
    longest = [moments.longest_of(n) for n in (1, 8, 64, 10_000)]
    assert longest == sorted(longest)
    assert (longest[0], longest[-1]) == (200.0, 500.0)
    assert moments.total_square == 700.0**2 + 100.0**2


def test_maxima_stand_in_for_absent_means() -> None:
    assert moments_of(Lengths(prompt=500, response=400)) == LengthMoments(500.0, 400.0, 0.0, 400.0)
    assert moments_of(Lengths(prompt=500, response=400)).longest_of(64) == 400.0


def test_mean_lengths_lower_the_price_only_when_calibrated() -> None:
    means = {"prompt": 500, "response": 500, "response_mean": 100, "response_std": 50}
    short = paper_job(SHAPE, prompts=8, responses=1, lengths=means)
    full = paper_job(SHAPE, prompts=8, responses=1, prompt=500, response=500)
    cluster, placement = paper_cluster([("A100-40", "va", 4)]), hand_task(np.array([[[0]]]), [2], [8])
    for model, comparison in ((CostModel.paper(), float.__eq__), (CostModel.calibrated(), float.__lt__)):
        cheap, dear = (PlanEvaluator(cluster, job, model).task_s(RlTask.ACTOR_GENERATION, placement, (8,))
                       for job in (short, full))  # fmt: skip
        assert comparison(cheap, dear)


def test_calibration_document_round_trips_and_refuses_unknown_fields() -> None:
    assert load_calibration(IDEAL.model_dump_json(), "c.json") == IDEAL
    with pytest.raises(SpecError, match=r"c.yaml: links.within is given, but this format has no such field"):
        load_calibration("format: motley.calibration/1\nlinks: {within: 1}", "c.yaml")


def test_coefficients_of_a_gpu_type_that_does_not_exist_are_refused() -> None:
    """Of a type that is misspelt they would silently be the built-in ones."""
    text = "format: motley.calibration/1\ngpu_types: {A100: {hbm: 0.5}, mine: {hbm: 0.5}}\n"
    assert set(load_calibration(text, "c.yaml").gpu_types) == {"A100", "mine"}
    with pytest.raises(SpecError, match=r"c\.yaml: gpu_types\.A100 is 'A100'.* write 'A100-40', or remove the entry"):
        load_calibration(text, "c.yaml", ("A100-40", "L4", "mine"))


def test_factors_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"eta is 2\.0"):
        CostModel.paper(eta=2.0)
    with pytest.raises(ValueError, match=r"delta_fraction is 0\.0"):
        CostModel.calibrated(delta_fraction=0.0)
