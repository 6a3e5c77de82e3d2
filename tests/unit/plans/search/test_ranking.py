"""Rankings of layouts: prices of recipes in bulk are those of their layouts alone."""

import itertools
import math

import numpy as np
import pytest

from plans.cost import CostModel
from plans.search.guesses import ARRANGEMENTS
from plans.search.layouts import Arrangement, Recipe
from plans.search.problem import Problem
from plans.search.recipe_table import RecipeTable
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from plans.workflow import RlTask

TASKS = (RlTask.ACTOR_GENERATION, RlTask.REWARD_INFERENCE, RlTask.ACTOR_TRAINING)


def tools_for(name="hetrl-multi-region-hybrid"):
    job = hetrl_job("4b", Algorithm.PPO, Mode.SYNC)
    return SearchTools(Problem(find_testbed(name).cluster, job, CostModel.paper()))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("deep", [False, True])
def test_ranked_layouts_cost_what_they_cost_alone_and_the_fastest_come_first(task, deep):
    tools, rng = tools_for(), Draws(3)
    gpus = tuple(sorted(rng.sample(range(64), 21)))
    ranking = tools.ranker.ranked(task, gpus, (task,), deep=deep)
    assert ranking.entries
    for entry in ranking.entries:
        assert tools.pricer.task_s(task, entry.layout) == (entry.seconds, entry.share)
        assert len(set(entry.layout.gpus)) == len(entry.layout.gpus)
    seconds = [entry.seconds for entry in ranking.entries]
    assert seconds == sorted(seconds)


def test_every_recipe_is_priced_like_its_layout_and_equal_layouts_alike():
    tools, task = tools_for(), RlTask.ACTOR_TRAINING
    guesses = tools.ranker.guesses(task, tuple(range(4, 44)))
    recipes = [
        Recipe(subset, tp, pp, by_type, arrangement)
        for subset, tp, pp, by_type, arrangement in itertools.product(
            range(len(guesses.subsets)), (1, 2, 8), (1, 2, 3, 5, 40), (False, True), ARRANGEMENTS
        )
    ]
    table = RecipeTable(guesses)
    for begin in (0, 100):  # a table is filled in pieces
        table.extend(recipes[begin : begin + 100] if not begin else recipes[begin:])
        tools.pricer.price_recipes(task, 0.0, table, begin)
    by_hash = {}
    for recipe, found, price in zip(recipes, table.hashes.tolist(), table.prices.tolist(), strict=True):
        layout = guesses.build(recipe)
        assert (layout is None) == (found == 0)
        if layout is None:
            assert price == [math.inf, math.inf]
            continue
        assert tuple(price) == tools.pricer.task_s(task, layout)
        assert by_hash.setdefault(found, layout) == layout
    assert 0 < len(by_hash) < np.count_nonzero(table.hashes)


def test_recipes_that_the_gpus_do_not_allow_have_no_layout():
    guesses = tools_for().ranker.guesses(RlTask.REFERENCE_INFERENCE, tuple(range(8)))
    plain = Recipe(0, 1, 2, False, Arrangement.REPLICA_BLOCKS)
    assert guesses.build(plain).dp == 4
    assert guesses.build(plain._replace(pp=9)) is None
    assert guesses.build(plain._replace(subset=9)) is None
    assert guesses.build(plain._replace(pp=1, arrangement=Arrangement.STAGE_BLOCKS)) is None
    assert guesses.build(plain._replace(arrangement=Arrangement.SLOW_ENDS)) is None  # one kind of GPU
