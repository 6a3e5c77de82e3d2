"""Re-sharding and weight sync."""

from __future__ import annotations

import numpy as np
import pytest

from plans.cost.collectives import LinkTimes
from plans.cost.model import CostModel, Fanout
from plans.cost.price import link_times
from plans.cost.transfer import StageSlots, WeightLine, per_region_s, sequential_s, transfer_s
from tests.helpers.planner_cases import paper_cluster

LINE = WeightLine(embedding_bytes=10e9, layer_bytes=20e9, head_bytes=10e9, num_layers=4)


def seconds(training: list[StageSlots], generation: list[StageSlots], model: CostModel | None = None) -> float:
    # m0: 4 GPUs at 600 GB/s (0-3), m1: 4 GPUs at 64 GB/s (4-7), 10 ms and 5 Gbps between their regions.
    cluster = paper_cluster([("A100-40", "va", 4), ("L4", "oh", 4)])
    chosen = model or CostModel.paper()
    return transfer_s(LINE, cluster.view, link_times(cluster.view, chosen), chosen, training, generation)


def test_equal_placements_move_nothing() -> None:
    placed = [[(4, (0, 1))], [(4, (2, 3))]]
    assert seconds(placed, placed) == 0.0


def test_resharding_tp4_to_tp2_moves_the_hybridflow_volume() -> None:
    # M (4 - 2) / (2 * 4) = 25e9 bytes inside micro-DP groups of two GPUs of one machine.
    assert LINE.total_bytes == 100e9
    assert seconds([[(4, (0, 1, 2, 3))]], [[(4, (0, 1))], [(4, (2, 3))]]) == pytest.approx(25e9 / 600e9)


def test_resharding_with_degrees_that_do_not_divide_gathers_everything() -> None:
    # TP2 -> PP2: p_g = 2 does not divide p = 1: M (2 - 1) / 2.
    assert seconds([[(4, (0, 1))]], [[(2, (0,)), (2, (1,))]]) == pytest.approx(50e9 / 600e9)


def test_direct_pull_is_bound_by_the_busiest_sender() -> None:
    # Two single-GPU generation replicas on m1 pull everything from GPU 0: 0.01 + 100e9 / 0.625e9 each, one sender.
    assert seconds([[(4, (0,))]], [[(4, (4,))], [(4, (5,))]]) == pytest.approx(2 * (0.01 + 160.0))


def test_direct_pull_from_stages_sums_at_the_receiver() -> None:
    # Stages hold embedding + 1 layer (30e9) and 3 layers + head (70e9); one receiver: 0.01 + 48 + 0.01 + 112.
    assert seconds([[(1, (0,)), (3, (1,))]], [[(4, (4,))]]) == pytest.approx(160.02)


def test_what_a_gpu_holds_already_costs_nothing() -> None:
    # Generation on a subset: GPU 0 holds the first half of every matrix, the other half comes from GPU 1.
    assert seconds([[(4, (0, 1))]], [[(4, (0,))]]) == pytest.approx(50e9 / 600e9)


def test_delta_fraction_scales_the_bytes() -> None:
    model = CostModel.calibrated(fanout=Fanout.DIRECT, delta_fraction=0.1)
    # Calibrated link efficiency 0.8.
    assert seconds([[(4, (0,))]], [[(4, (4,))]], model) == pytest.approx(0.01 + 10e9 / (0.625e9 * 0.8))


def test_fan_out_modes_on_three_machines() -> None:
    # Machine 0 trains in region 0; machines 1, 2 generate in region 1. WAN 1 s per GB and 2 s latency, local 0.1 s.
    latency = np.array([[0.0, 2.0, 2.0], [2.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    inverse = np.array([[0.01, 1.0, 1.0], [1.0, 0.01, 0.1], [1.0, 0.1, 0.01]]) * 1e-9
    links = LinkTimes(latency, inverse, latency_per_step=False)
    assert sequential_s(links, [0], [1, 2], 10e9) == pytest.approx(24.0)
    assert per_region_s(links, [0, 1, 1], [0], [1, 2], 10e9) == pytest.approx(13.0)
    assert per_region_s(links, [0, 1, 1], [0, 1], [1, 2], 10e9) == pytest.approx(1.0)
