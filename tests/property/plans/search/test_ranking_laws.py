"""Rankings by machine code are those of the plain rules, and units are whole sets of GPUs of one machine."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from plans.cost import CostModel
from plans.search.compiled.ranking import CLIMB_ROUNDS, CLIMBERS, KEPT, NEAR_PPS
from plans.search.guesses import ARRANGEMENTS
from plans.search.layouts import Arrangement, Recipe
from plans.search.problem import Problem
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from plans.workflow import RlTask

TESTBEDS = ("hetrl-multi-region-hybrid", "hetrl-multi-continent", "hetrl-single-region-24")
TASKS = (RlTask.ACTOR_GENERATION, RlTask.REWARD_INFERENCE, RlTask.ACTOR_TRAINING)
seeds, tasks, testbeds = st.integers(0, 2**32 - 1), st.sampled_from(TASKS), st.sampled_from(TESTBEDS)


@cache
def tools_of(testbed, is_calibrated):
    model = CostModel.calibrated() if is_calibrated else CostModel.paper()
    return SearchTools(Problem(find_testbed(testbed).cluster, hetrl_job("4b", Algorithm.PPO, Mode.SYNC), model))


def drawn_gpus(tools, seed):
    rng, count = Draws(seed), tools.problem.view.num_gpus
    return tuple(sorted(rng.sample(range(count), rng.between(1, count))))


def plain_recipes(guesses, deep):
    found = []
    for tp in guesses.tps(0):
        offered = guesses.pps(tp, guesses.count_units(0, tp))
        for arrangement in ARRANGEMENTS if deep else ARRANGEMENTS[:1]:
            some = [pp for pp in offered if deep or pp.bit_count() == 1 or pp == offered[0]]
            found += [Recipe(0, tp, pp, False, arrangement) for pp in some]
    return found


def single_changes(guesses, recipe):
    found = [recipe._replace(arrangement=arrangement) for arrangement in ARRANGEMENTS]
    found.append(recipe._replace(by_type=not recipe.by_type))
    found += [recipe._replace(subset=subset) for subset in range(len(guesses.subsets))]
    found += [recipe._replace(tp=tp) for tp in guesses.tps(recipe.subset)]
    pps = guesses.pps(recipe.tp, guesses.count_units(recipe.subset, recipe.tp))
    if recipe.pp in pps:
        at = pps.index(recipe.pp)
        found += [recipe._replace(pp=pp) for pp in pps[max(0, at - NEAR_PPS) : at + NEAR_PPS + 1]]
    return found


def plain_ranking(tools, task, guesses, held, deep):
    """Return (seconds, share, layout) of the layouts that are kept."""
    tried = {}

    def attempt(recipes):
        for recipe in recipes:
            if recipe not in tried:
                layout = guesses.build(recipe)
                price = (float("inf"), float("inf")) if layout is None else tools.pricer.task_s(task, layout, held)
                tried[recipe] = (price, layout)

    attempt(plain_recipes(guesses, deep))
    leaders = []
    for _ in range(CLIMB_ROUNDS):
        ranked = sorted(tried, key=lambda recipe: (tried[recipe][0][1] > 1.0, tried[recipe][0][0]))
        before, leaders = leaders, ranked[: CLIMBERS if deep else 1]
        if leaders == before:
            break
        for leader in leaders:
            if leader not in before:
                attempt(single_changes(guesses, leader))
    fitting = {}
    for (seconds, share), layout in tried.values():
        if layout is not None and seconds < float("inf") and share <= 1.0:
            fitting.setdefault((layout.dp, layout.pp, layout.tp, layout.gpus), (seconds, share, layout))
    kept, least = [], float("inf")
    for position, entry in enumerate(sorted(fitting.values(), key=lambda entry: entry[:2])):
        if position < KEPT // 2 or entry[1] < least * 0.95:
            kept.append(entry)
        least = min(least, entry[1])
    return kept[:KEPT]


@settings(max_examples=30, deadline=None)
@given(seed=seeds, testbed=testbeds, task=tasks, held=st.sampled_from([0.0, 3e9]), deep=st.booleans(),
       is_calibrated=st.booleans())  # fmt: skip
def test_machine_code_ranks_layouts_by_the_plain_rules(seed, testbed, task, held, deep, is_calibrated):
    tools = tools_of(testbed, is_calibrated)
    guesses = tools.ranker.guesses(task, drawn_gpus(tools, seed))
    found = tools.pricer.rank(task, guesses, held, deep=deep)
    assert [(entry.seconds, entry.share, entry.layout) for entry in found] == plain_ranking(
        tools, task, guesses, held, deep
    )
    assert all(guesses.build(entry.recipe) == entry.layout for entry in found)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, testbed=testbeds, tp=st.sampled_from([1, 2, 4, 8]), by_type=st.booleans())
def test_units_are_gpus_of_one_machine_along_the_order(seed, testbed, tp, by_type):
    tools = tools_of(testbed, False)
    gpus, order, machine_of = drawn_gpus(tools, seed), tools.problem.order, tools.problem.machine_of
    guesses = tools.ranker.guesses(RlTask.REWARD_INFERENCE, gpus)
    rank = order.type_rank if by_type else order.near_rank
    for subset, machines in enumerate(guesses.subsets):
        expected = []
        for machine in sorted(machines, key=rank.__getitem__):
            members = [gpu for gpu in gpus if machine_of[gpu] == machine]
            expected += members[: len(members) // tp * tp]
        layout = guesses.build(Recipe(subset, tp, 1, by_type, Arrangement.REPLICA_BLOCKS))
        assert (() if layout is None else layout.gpus) == tuple(expected)
        assert guesses.count_units(subset, tp) == len(expected) // tp
