"""Every term of the published formulas on hand-derived cases.

Shape h1 = 1000, h2 = 2000, 4 layers; s_in = s_out = 500, s = 1000. By hand:
F(s) = 8 s h1^2 + 4 s^2 h1 + 6 s h1 h2 = 8e9 + 4e9 + 12e9 = 24e9; F(s_in) = 4e9 + 1e9 + 6e9 = 11e9.
Weights of a layer: 4 h1^2 + 3 h1 h2 = 10e6, 20e6 bytes. Activation of a sample: 2 s h1 = 2e6 bytes.
Chips: slow 1 TFLOP/s, 100 GB/s HBM (0, 1); fast 2 TFLOP/s, 200 GB/s (2, 3).
Links: 10 GB/s inside machine a, 20 GB/s inside b, 100 ms and 1 GB/s between them.
"""

from __future__ import annotations

import pytest

from plans.cost.collectives import LinkTimes
from plans.cost.model import CostModel
from plans.cost.price import link_times
from plans.cost.task_cost import ReplicaPlacement, StagePlacement, TaskCost, task_cost
from plans.cost.terms import build_terms
from plans.spec.cluster import Cluster
from plans.spec.load import cluster_from_document
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_job

SHAPE = {"layers": 4, "hidden": 1000, "intermediate": 2000, "heads": 10, "kv_heads": 10, "head_dim": 100, "vocab": 100,
         "tied": False}  # fmt: skip


def two_regions() -> Cluster:
    document = {
        "format": "motley.cluster/1", "name": "two",
        "gpu_types": {"slow": {"memory_gb": 100, "tflops": 1, "hbm_gb_s": 100, "usd_per_hour": 1},
                      "fast": {"memory_gb": 100, "tflops": 2, "hbm_gb_s": 200, "usd_per_hour": 3}},
        "machines": [{"name": "a", "region": "r1", "gpu": "slow", "count": 2, "intra_gb_s": 10},
                     {"name": "b", "region": "r2", "gpu": "fast", "count": 2, "intra_gb_s": 20}],
        "links": {"regions": [{"between": ["r1", "r2"], "latency_ms": 100, "bandwidth_gbps": 8}]},
    }  # fmt: skip
    return cluster_from_document(document, "two")


def cost_of(task: RlTask, *replicas: ReplicaPlacement, **sections: object) -> TaskCost:
    cluster = two_regions()
    job = paper_job(SHAPE, prompts=10, responses=1, prompt=500, response=500, **sections)
    model = CostModel.paper()
    links: LinkTimes = link_times(cluster.view, model)
    return task_cost(build_terms(cluster.view, job, task, model), cluster.view, links, replicas)


def replica(samples: int, *stages: tuple[int, tuple[int, ...]], mbs: int = 1, batch: int = 1) -> ReplicaPlacement:
    return ReplicaPlacement(samples, mbs, tuple(StagePlacement(layers, gpus) for layers, gpus in stages), batch)


def test_compute_of_one_gpu_is_three_forwards_when_training() -> None:
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(10, (4, (0,))))
    assert cost.comp_s == pytest.approx(3 * 10 * 4 * 24e9 / 1e12)
    assert cost.total_s == pytest.approx(2.88)


def test_inference_is_one_forward() -> None:
    assert cost_of(RlTask.REFERENCE_INFERENCE, replica(10, (4, (0,)))).total_s == pytest.approx(0.96)


def test_micro_batches_are_rounded_up() -> None:
    # 5 samples in micro-batches of 2: nm = 3, so 6 samples are computed.
    assert cost_of(RlTask.REFERENCE_INFERENCE, replica(5, (4, (0,)), mbs=2)).comp_s == pytest.approx(0.576)


def test_tp_across_regions_pays_the_link_and_the_slower_chip() -> None:
    # cv_tp = 2e6 * 2 * 1/2 = 2e6; edge 0.1 + 0.002; 6 * 10 * 4 all-reduces; compute by the slow chip: 2.88 / 2.
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(10, (4, (0, 2))))
    assert (cost.tp_s, cost.comp_s, cost.total_s) == pytest.approx((24.48, 1.44, 25.92))


def test_tp_without_recompute_has_four_all_reduces_per_layer() -> None:
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(10, (4, (0, 2))), training={"recompute": "none"})
    assert cost.tp_s == pytest.approx(16.32)


def test_heterogeneous_ring_is_decided_by_its_slowest_edge() -> None:
    # cv_tp = 2e6 * 2 * 3/4 = 3e6; any ring over both machines crosses: 0.1 + 0.003.
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(10, (4, (0, 2, 1, 3))))
    assert cost.tp_s == pytest.approx(6 * 10 * 4 * 0.103)


def test_ring_inside_a_machine_uses_its_own_link() -> None:
    assert cost_of(RlTask.REWARD_INFERENCE, replica(10, (4, (2, 3)))).tp_s == pytest.approx(2 * 10 * 4 * 2e6 / 20e9)


def test_pipeline_across_regions_with_uneven_layers_adds_transfer_and_bubble() -> None:
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(10, (1, (0,)), (3, (2,))))
    # Stage 0: 3*10*1*24e9/1e12 = 0.72 and 2*10*(0.1 + 0.002) = 2.04; stage 1: 3*10*3*24e9/2e12 = 1.08.
    assert (cost.comp_s, cost.pp_s, cost.bubble_s, cost.total_s) == pytest.approx((1.08, 2.04, 0.108, 2.868))
    assert cost.bottleneck == (0, 0)


def test_pipeline_between_spread_stages_uses_the_best_pair() -> None:
    cost = cost_of(RlTask.REFERENCE_INFERENCE, replica(10, (2, (0, 2)), (2, (1, 3))))
    # GPU 2 -> GPU 3 inside machine b: 10 * 2e6 / 20e9.
    assert cost.pp_s == pytest.approx(0.001)
    assert cost.bubble_s == 0.0


def test_uneven_samples_and_gradient_ring_across_regions() -> None:
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(4, (4, (0,))), replica(6, (4, (2,))))
    # 3*4*4*24e9/1e12 = 1.152, 3*6*4*24e9/2e12 = 0.864; ring: 4*20e6*2*1/2 = 80e6 bytes -> 0.1 + 0.08.
    assert cost.replica_s == pytest.approx((1.152, 0.864))
    assert (cost.dp_s, cost.total_s) == pytest.approx((0.18, 1.332))


def test_gradient_ring_of_tp_shards_takes_the_slowest_rank() -> None:
    # Rank 0 rings over 0-2, rank 1 over 1-3, both across: 4*20e6*2*1/(2*2) = 40e6 -> 0.1 + 0.04.
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(5, (4, (0, 1))), replica(5, (4, (2, 3))))
    assert cost.dp_s == pytest.approx(0.14)


def test_gradient_rings_of_unaligned_stages_are_cut_at_every_boundary() -> None:
    # Replica 0 cuts 1 | 3 on GPUs 0, 1; replica 1 cuts 3 | 1 on GPUs 2, 3: pieces of 1, 2, 1 layers, all across.
    # Piece bytes 20e6, 40e6, 20e6 -> 0.12, 0.14, 0.12; GPU 1 holds the last two pieces: 0.26.
    cost = cost_of(RlTask.ACTOR_TRAINING, replica(5, (1, (0,)), (3, (1,))), replica(5, (3, (2,)), (1, (3,))))
    assert cost.dp_s == pytest.approx(0.26)


def test_generation_counts_prefill_and_decode_waves() -> None:
    # Prefill 10*4*11e9/1e12 = 0.44; decode 500 * 10/5 steps * 4*20e6/100e9.
    cost = cost_of(RlTask.ACTOR_GENERATION, replica(10, (4, (0,)), batch=5))
    assert (cost.comp_s, cost.hbm_s, cost.total_s) == pytest.approx((0.44, 0.8, 1.24))


def test_generation_takes_the_slowest_of_uneven_replicas() -> None:
    cost = cost_of(RlTask.ACTOR_GENERATION, replica(2, (4, (0,)), batch=2), replica(8, (4, (2,)), batch=8))
    # Slow: 2*4*11e9/1e12 + 500*8e-4 = 0.488; fast: 8*4*11e9/2e12 + 500*4e-4 = 0.376.
    assert cost.replica_s == pytest.approx((0.488, 0.376))
    assert cost.total_s == pytest.approx(0.488)
