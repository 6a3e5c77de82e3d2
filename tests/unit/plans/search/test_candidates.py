"""Candidates: growth of groups, guesses at layouts, mutations, moves."""

import numpy as np
import pytest

from plans.cost import CostModel
from plans.search.gpu_assignment import PLAIN_STYLES, RANDOM_STYLE, grow_groups
from plans.search.groupings import task_groupings
from plans.search.guesses import LayoutGuesses
from plans.search.layouts import Arrangement, Recipe, TaskLayout
from plans.search.machine_order import MachineOrder
from plans.search.mutations.faster_gpu import faster_gpu
from plans.search.mutations.registry import MUTATIONS
from plans.search.mutations.reorder_columns import reorder_columns
from plans.search.problem import Problem
from plans.search.regroup import REGROUP_MOVES
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.spec.job import Algorithm, Mode
from plans.spec.llm import BUILT_IN_SHAPES
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from plans.workflow import RlTask, TaskKind


def tools_for(name="hetrl-multi-continent", algorithm=Algorithm.PPO, mode=Mode.SYNC):
    return SearchTools(Problem(find_testbed(name).cluster, hetrl_job("4b", algorithm, mode), CostModel.paper()))


def assert_genome_is_sound(tools, genome):
    """Groups are a partition of tasks on disjoint GPUs; every tasklet has a GPU of its own in its group."""
    assert sorted(t.value for tasks in genome.grouping for t in tasks) == sorted(
        t.value for t in tools.problem.workflow.tasks
    )
    flat = [gpu for gpus in genome.gpus for gpu in gpus]
    assert len(flat) == len(set(flat))
    assert all(gpus and list(gpus) == sorted(gpus) for gpus in genome.gpus)
    for task, layout in genome.layouts.items():
        assert len(layout.gpus) == len(set(layout.gpus)) == layout.dp * layout.pp * layout.tp
        assert set(layout.gpus) <= set(genome.gpus[genome.group_of(task)])


@pytest.mark.parametrize("style", [*PLAIN_STYLES, RANDOM_STYLE])
def test_grown_groups_have_their_sizes_and_are_disjoint(style):
    tools = tools_for()
    grouping = next(g for g in task_groupings(tools.problem.workflow) if len(g) == 3)
    groups = grow_groups(tools.problem, grouping, (30, 20, 14), style, Draws(1))
    assert [len(group) for group in groups] == [30, 20, 14]
    assert sorted(gpu for group in groups for gpu in group) == list(range(64))


def test_grown_group_of_one_machine_size_is_one_machine():
    tools = tools_for()
    grouping = next(g for g in task_groupings(tools.problem.workflow) if len(g) == 2)
    groups = grow_groups(tools.problem, grouping, (8, 56), PLAIN_STYLES[0], Draws(0))
    assert len({int(tools.problem.view.machine_of[gpu]) for gpu in groups[0]}) == 1


def test_guess_keeps_tensor_parallelism_inside_machines():
    view = find_testbed("hetrl-multi-continent").cluster.view
    guesses = LayoutGuesses(
        MachineOrder(view), TaskKind.TRAINING, BUILT_IN_SHAPES["qwen3-8b"], range(64), least_shards=1
    )
    rng = Draws(0)
    layouts = [guesses.build(guesses.random_recipe(rng)) for _ in range(50)]
    for layout in filter(None, layouts):
        grid = view.machine_of[np.array(layout.gpus)].reshape(-1, layout.tp)
        assert (grid == grid[:, :1]).all()


def test_stage_blocks_keep_gradient_rings_near():
    view = find_testbed("hetrl-multi-continent").cluster.view
    guesses = LayoutGuesses(
        MachineOrder(view), TaskKind.TRAINING, BUILT_IN_SHAPES["qwen3-8b"], range(64), least_shards=1
    )
    layout = guesses.build(Recipe(subset=0, tp=2, pp=8, by_type=False, arrangement=Arrangement.STAGE_BLOCKS))
    machines = view.machine_of[np.array(layout.gpus)].reshape(layout.dp, layout.pp, layout.tp)
    assert all(len(set(machines[:, stage].ravel().tolist())) == 1 for stage in range(layout.pp))


@pytest.mark.parametrize("gpus", [10, 20, 24, 44, 64])
def test_depths_that_leave_no_gpu_idle_are_always_on_offer(gpus):
    view, shape = find_testbed("hetrl-single-region").cluster.view, BUILT_IN_SHAPES["qwen3-4b"]
    guesses = LayoutGuesses(MachineOrder(view), TaskKind.TRAINING, shape, range(gpus), least_shards=1)
    for tp in guesses.tps(0):
        count = guesses.count_units(0, tp)
        exact = {pp for pp in range(1, min(count, shape.layers) + 1) if count % pp == 0}
        assert exact <= set(guesses.pps(tp, count))


def slow_ends(tp, pp, kind=TaskKind.TRAINING):
    view = find_testbed("hetrl-single-region-24").cluster.view
    guesses = LayoutGuesses(MachineOrder(view), kind, BUILT_IN_SHAPES["qwen3-4b"], range(24), least_shards=1)
    layout = guesses.build(Recipe(subset=0, tp=tp, pp=pp, by_type=True, arrangement=Arrangement.SLOW_ENDS))
    if layout is None:
        return None
    names = [view.type_names[view.type_of[gpu]] for gpu in layout.gpus]
    return np.array(names).reshape(layout.dp, layout.pp, layout.tp)


def test_slow_ends_begin_and_end_every_pipeline_on_the_slowest_kind():
    grid = slow_ends(tp=1, pp=6)
    assert grid.shape == (4, 6, 1)
    assert (grid[:, [0, -1]] == "L4").all()
    assert all(len(set(row[1:-1].ravel().tolist())) == 1 for row in grid)


def test_slow_ends_need_a_slow_place_for_each_replica():
    # 4 units of L4 for 12 replicas are too few; with TP 8 each kind is one unit, and one pipeline holds all three.
    assert slow_ends(tp=2, pp=1) is None
    assert slow_ends(tp=8, pp=3)[0, :, 0].tolist().count("L4") == 1


def test_reordered_columns_keep_replicas_shards_and_column_members():
    tools = tools_for("hetrl-single-region-24")
    grouping = next(g for g in task_groupings(tools.problem.workflow) if len(g) == 1)
    genome, rng = tools.seeder.fitted(grouping, (tuple(range(24)),)), Draws(3)
    for task in genome.layouts:
        layout = TaskLayout(4, 3, 2, tuple(range(24)))
        genome = genome.with_layout(task, layout)
    for _ in range(20):
        offspring = reorder_columns(tools, genome, rng)
        task = next(task for task in genome.layouts if offspring.layouts[task] is not genome.layouts[task])
        before, after = (np.array(g.layouts[task].gpus).reshape(4, 3, 2) for g in (genome, offspring))
        order = [before[0].tolist().index(stage) for stage in after[0].tolist()]
        assert sorted(order) == [0, 1, 2]
        assert order != [0, 1, 2]
        assert (after == before[:, order]).all()
        genome = offspring


@pytest.mark.parametrize("operator", [*MUTATIONS, *REGROUP_MOVES], ids=lambda entry: entry[0].__name__)
@pytest.mark.parametrize("mode", list(Mode))
def test_every_operator_returns_sound_candidates(operator, mode):
    tools = tools_for(mode=mode)
    rng = Draws(5)
    grouping = next(g for g in task_groupings(tools.problem.workflow) if len(g) == 3)
    genome = tools.seeder.fitted(grouping, grow_groups(tools.problem, grouping, (24, 24, 16), PLAIN_STYLES[0], rng))
    changed = 0
    for _ in range(12):
        offspring = operator[0](tools, genome, rng)
        if offspring is not None:
            assert_genome_is_sound(tools, offspring)
            if mode is Mode.ASYNC:
                assert (RlTask.ACTOR_GENERATION,) in offspring.grouping
            changed += 1
            genome = offspring
    assert changed or operator[0] is faster_gpu


def test_faster_gpu_gives_training_a_faster_one_and_keeps_sizes():
    tools = tools_for()
    rng = Draws(0)
    generation = (RlTask.ACTOR_GENERATION,)
    rest = tuple(task for task in tools.problem.workflow.tasks if task is not RlTask.ACTOR_GENERATION)
    speed = tools.problem.view.compute_flop_per_s
    ordered = sorted(range(64), key=lambda gpu: speed[gpu])
    slow, fast = tuple(sorted(ordered[:32])), tuple(sorted(ordered[32:]))
    genome = tools.seeder.fitted((generation, rest), (fast, slow))
    offspring = faster_gpu(tools, genome, rng)
    assert [len(gpus) for gpus in offspring.gpus] == [32, 32]
    assert speed[list(offspring.gpus[1])].sum() > speed[list(genome.gpus[1])].sum()
