"""Laws of the locality swap search."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.search.genome import Genome
from plans.search.layouts import TaskLayout
from plans.search.locality import LocalitySearch, group_counts, locality_score, machine_affinity
from plans.search.swap_search import SwapSearch
from plans.testbeds.registry import find_testbed
from plans.workflow import RlTask

VIEW = find_testbed("hetrl-multi-region-hybrid").cluster.view
AFFINITY = machine_affinity(VIEW)


@st.composite
def groups_of_gpus(draw):
    labels = draw(st.lists(st.integers(0, 2), min_size=64, max_size=64).filter(lambda found: len(set(found)) == 3))
    return [tuple(gpu for gpu, label in enumerate(labels) if label == group) for group in range(3)]


@settings(max_examples=30, deadline=None)
@given(groups_of_gpus())
def test_incremental_gain_equals_recomputation(groups):
    counts = group_counts(VIEW, groups)
    search = LocalitySearch(AFFINITY, counts)
    for _ in range(20):
        before = locality_score(AFFINITY, search.counts)
        swap = search.best_swap()
        if swap is None:
            break
        search.apply(swap)
        assert np.isclose(locality_score(AFFINITY, search.counts) - before, swap.gain)
        assert np.allclose(search.sums, AFFINITY @ search.counts)


@settings(max_examples=30, deadline=None)
@given(groups_of_gpus())
def test_improved_candidate_keeps_sizes_and_never_loses_score(groups):
    tasks = (RlTask.ACTOR_GENERATION, RlTask.REWARD_INFERENCE, RlTask.ACTOR_TRAINING)
    layouts = {task: TaskLayout(len(gpus), 1, 1, gpus) for task, gpus in zip(tasks, groups, strict=True)}
    genome = Genome(tuple((task,) for task in tasks), tuple(groups), layouts)
    improved = SwapSearch(VIEW).improve(genome)
    assert [len(gpus) for gpus in improved.gpus] == [len(gpus) for gpus in groups]
    assert sorted(gpu for gpus in improved.gpus for gpu in gpus) == list(range(64))
    for task, gpus in zip(tasks, improved.gpus, strict=True):
        assert sorted(improved.layouts[task].gpus) == list(gpus)
    assert locality_score(AFFINITY, group_counts(VIEW, improved.gpus)) >= locality_score(
        AFFINITY, group_counts(VIEW, groups)
    )


SWAPS = SwapSearch(VIEW)


@settings(max_examples=30, deadline=None)
@given(groups_of_gpus(), st.integers(0, 7))
def test_kept_swaps_of_equal_machines_improve_like_new_ones(groups, offset):
    """Another candidate with as many GPUs of each machine in each group; its GPUs differ."""
    turned = [tuple(sorted(gpu // 8 * 8 + (gpu + offset) % 8 for gpu in gpus)) for gpus in groups]
    tasks = (RlTask.ACTOR_GENERATION, RlTask.REWARD_INFERENCE, RlTask.ACTOR_TRAINING)
    for drawn in (groups, turned):
        layouts = {task: TaskLayout(len(gpus), 1, 1, gpus) for task, gpus in zip(tasks, drawn, strict=True)}
        genome = Genome(tuple((task,) for task in tasks), tuple(drawn), layouts)
        assert SWAPS.improve(genome) == SwapSearch(VIEW).improve(genome)
