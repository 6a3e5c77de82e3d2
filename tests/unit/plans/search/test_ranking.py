"""Rankings of layouts: each costs what it costs alone; recipes without a layout."""

import pytest

from plans.cost import CostModel
from plans.search.layouts import Arrangement, Recipe
from plans.search.problem import Problem
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


def test_recipes_that_the_gpus_do_not_allow_have_no_layout():
    guesses = tools_for().ranker.guesses(RlTask.REFERENCE_INFERENCE, tuple(range(8)))
    plain = Recipe(0, 1, 2, False, Arrangement.REPLICA_BLOCKS)
    assert guesses.build(plain).dp == 4
    assert guesses.build(plain._replace(pp=9)) is None
    assert guesses.build(plain._replace(subset=9)) is None
    assert guesses.build(plain._replace(pp=1, arrangement=Arrangement.STAGE_BLOCKS)) is None
    assert guesses.build(plain._replace(arrangement=Arrangement.SLOW_ENDS)) is None  # one kind of GPU
