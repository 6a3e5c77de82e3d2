"""Repartition: machine classes, the table of splits, and what breaks without repairs 2 and 7."""

import numpy as np
import pytest

from plans.search.areal_hex.machine_classes import machine_classes
from plans.search.areal_hex.splits import Split, SplitTable
from plans.testbeds.registry import find_testbed
from tests.helpers.planner_cases import paper_cluster


def table_of(cluster, *, mean_bandwidth=True):
    return SplitTable(cluster.view, machine_classes(cluster.view), mean_bandwidth=mean_bandwidth)


def test_machine_classes_group_equal_machines_only():
    classes = machine_classes(find_testbed("areal-hex-8-24").cluster.view)
    assert [(c.machines, c.size, c.num_gpus) for c in classes] == [((0,), 8, 8), ((1, 2, 3), 8, 24)]
    hybrid = find_testbed("hetrl-multi-region-hybrid").cluster.view
    assert [c.machines for c in machine_classes(hybrid)] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    spread = find_testbed("hetrl-multi-country").cluster.view
    assert [c.machines for c in machine_classes(spread)] == [(m,) for m in range(8)]


def test_machine_classes_see_a_special_link():
    cluster = paper_cluster([("A100-40", "r", 4)] * 3)
    links = cluster.links.model_dump()
    links["machines"] = [{"between": ("m0", "m1"), "latency_ms": 1.0, "bandwidth_gbps": 1.0}]
    changed = cluster.model_validate({**cluster.model_dump(), "links": links})
    assert [c.machines for c in machine_classes(changed.view)] == [(0, 1), (2,)]


def test_split_gives_training_the_first_gpus_of_each_machine():
    view = find_testbed("areal-hex-8-24").cluster.view
    split = Split((8, 2, 0, 0))
    assert split.training_gpus(view) == tuple(range(10))
    assert split.rollout_gpus(view) == tuple(range(10, 32))


def test_band_holds_a_split_where_equality_holds_none():
    # Repair 2: training's share of compute is rarely exactly the midpoint.
    table = table_of(find_testbed("areal-hex-8-24").cluster)
    assert table.in_band(0.47, 0.47, 1) == []
    half = table.step_share / 2
    (split,) = table.in_band(0.47 - half, 0.47 + half, 1)
    assert abs(table.share_of(split) - 0.47) <= half


def test_objective_gives_links_to_training_and_memory_bandwidth_to_generation():
    table = table_of(find_testbed("areal-hex-8-24").cluster)
    h800, h20 = np.array([[8, 0, 0, 0]]), np.array([[0, 8, 8, 8]])
    # Inside one H800 machine every pair has 200 of the best 450 GB/s; all HBM of the H20s generates: 96 of 112 TB/s.
    assert table.objective(h800)[0] == pytest.approx(200 / 450 + 96 / 112)
    pairs_inside, pairs_across = 3 * 28, 3 * 64
    mean = (pairs_inside * 450 + pairs_across * 5) / (pairs_inside + pairs_across)
    assert table.objective(h20)[0] == pytest.approx(mean / 450 + 16 / 112)


def test_summed_bandwidth_prefers_more_slow_links_to_few_fast_ones():
    # Repair 7: three machines with slow links between them have more bandwidth in sum than one fast machine.
    cluster = paper_cluster([("A100-40", "r", 8), ("A100-40", "s", 8), ("A100-40", "s", 8)], local_gbps=400)
    small, large = np.array([[8, 0, 0]]), np.array([[0, 8, 8]])
    printed, repaired = table_of(cluster, mean_bandwidth=False), table_of(cluster)

    def links_of(table, counts):
        generating = (24 - counts.sum()) / 24
        return float(table.objective(counts)[0]) - generating

    assert links_of(printed, large) > 2 * links_of(printed, small)
    assert links_of(repaired, large) < links_of(repaired, small) == pytest.approx(1.0)


def test_neighbours_move_one_step_or_exchange_one():
    table = table_of(find_testbed("areal-hex-8-24").cluster)
    found = {n.training for n in table.neighbours(Split((8, 0, 0, 0)), (4, 4))}
    assert found == {(4, 0, 0, 0), (8, 4, 0, 0), (4, 4, 0, 0)}


def test_table_of_a_large_cluster_stays_small_and_spans_all_shares():
    table = table_of(find_testbed("scaling-512").cluster)
    assert len(table.shares) < 20_001
    for gamma in (0.2, 0.4, 0.6, 0.8):
        assert table.in_band(gamma - 0.02, gamma + 0.02, 1)
