"""The outer loop on made-up costs, and what breaks without repairs 3 and 4."""

import math
from dataclasses import replace

from plans.search.areal_hex.alternation import Alternation, SplitCost
from plans.search.areal_hex.machine_classes import machine_classes
from plans.search.areal_hex.settings import ArealHexSettings
from plans.search.areal_hex.splits import SplitTable
from tests.helpers.planner_cases import paper_cluster

ON = ArealHexSettings(swap_search=False)


def loop(cost_of_share, settings=ON, machines=8):
    cluster = paper_cluster([("A100-40", "r", 1)] * machines)
    table = SplitTable(cluster.view, machine_classes(cluster.view), mean_bandwidth=True)

    def cost(split):
        training, rollout = cost_of_share(sum(split.training))
        return SplitCost(training_s=training, rollout_s=rollout, objective_s=max(training, rollout))

    return Alternation(table, settings, cost, lambda: False)


def balanced(members):
    return (120.0 / members if members else math.inf), (120.0 / (8 - members) if members < 8 else math.inf)


def test_bisection_finds_the_balance():
    alternation = loop(balanced)
    split = alternation.run()
    assert sum(split.training) == 4
    assert alternation.rounds[0].gamma == 1.0
    assert all(abs(r.realised - r.gamma) <= 1 / 16 + 1e-9 for r in alternation.rounds[1:])


def test_printed_start_ends_at_an_empty_side():
    assert loop(balanced, replace(ON, infinite_empty_side=False)).run() is None


def test_exact_share_ends_where_no_split_has_it():
    alternation = loop(balanced, replace(ON, share_band=False), machines=7)
    assert alternation.run() is None
    assert alternation.rounds[-1].realised is None


def test_last_split_can_be_worse_than_the_best_seen():
    # Discrete plans: the split that the bisection passes first happens to be fast on both sides.
    def jagged(members):
        return (9.0, 10.0) if members == 4 else balanced(members)

    one = replace(ON, splits_per_round=1)
    assert sum(loop(jagged, one).run().training) == 4
    assert sum(loop(jagged, replace(one, keep_best=False)).run().training) == 3


def test_swap_search_reaches_what_the_bisection_passes_by():
    # At half of the GPUs generation is slower, which sends the bisection down; one step up both would be faster.
    def misleading(members):
        return (1.0, 20.0) if members == 5 else (10.0, 100.0)

    assert sum(loop(misleading).run().training) != 5
    assert sum(loop(misleading, ArealHexSettings()).run().training) == 5


def test_scan_finds_the_only_split_that_runs():
    def narrow(members):
        return (5.0, 5.0) if members == 7 else (math.inf, math.inf)

    assert sum(loop(narrow).run().training) == 7


def test_patience_ends_the_rounds():
    alternation = loop(lambda members: (1.0, 2.0), replace(ON, patience=1))
    alternation.run()
    assert len(alternation.rounds) <= 4
