"""Changes of role: which ones there are, what they are judged by, and that they are the best of all by brute force."""

from itertools import chain

import pytest

from plans.cost import CostModel, price
from plans.cost.iteration import PhaseTimes
from plans.errors import NoIncumbentError
from plans.plan import check_plan
from plans.search.balancing import Balancing
from plans.search.budget import Budget
from plans.search.flip_roles import FlipRolesPlanner, SideFactors, flipped_pools
from plans.search.limits import Limits, TaskLimit
from plans.search.planner import make_plan
from plans.search.problem import Problem
from plans.search.tools import SearchTools
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_cluster, paper_job

MODEL = CostModel.calibrated()
EVEN = SideFactors(producer=1.0, consumer=1.0)


def case(*machines):
    cluster = paper_cluster(machines)
    job = paper_job("qwen3-1.7b", algorithm="grpo", mode="async", prompts=24)
    return cluster, job, make_plan(cluster, job, "streamrl", MODEL, Budget(evaluations=60)).plan


def sides(plan):
    generating = set(plan.tasks[RlTask.ACTOR_GENERATION].gpus)
    others = set(chain.from_iterable(p.gpus for t, p in plan.tasks.items() if t is not RlTask.ACTOR_GENERATION))
    return generating, others


def test_flips_of_two_machines_are_moves_of_one_half_all_and_exchanges():
    # Machine 0 generates with 3 GPUs, machine 1 trains with 2.
    found = set(flipped_pools(((0, 1, 2), (3, 4)), [0, 0, 0, 1, 1]))
    assert found == {
        ((0, 1), (2, 3, 4)), ((0,), (1, 2, 3, 4)),  # one and half of machine 0; all of it would leave nobody
        ((0, 1, 2, 4), (3,)),  # one of machine 1, which is half of it as well
        ((3, 4), (0, 1, 2)),  # exchange
    }  # fmt: skip


def test_flips_keep_every_gpu_once_and_never_repeat():
    pools, machine_of = ((0, 1, 4, 5), (2, 3, 6)), [0, 0, 1, 1, 2, 2, 3]
    found = list(flipped_pools(pools, machine_of))
    assert len(set(found)) == len(found) > 5
    for flipped in found:
        assert sorted(chain(*flipped)) == list(range(7))
        assert flipped != pools
        assert all(flipped)


def test_lonely_devices_of_both_sides_can_only_be_exchanged():
    assert list(flipped_pools(((0,), (1,)), [0, 1])) == [((1,), (0,))]
    assert list(flipped_pools(((0,), (1,)), [0, 0])) == []


def test_phases_are_scaled_by_the_side_that_they_belong_to():
    phases = PhaseTimes(10.0, 2.0, 6.0, 1.0, 11.0)
    assert SideFactors(producer=2.0, consumer=1.0).iteration_s(phases) == 21.0
    assert SideFactors(producer=1.0, consumer=3.0).iteration_s(phases) == 2.0 + 18.0 + 3.0
    assert EVEN.iteration_s(phases) == phases.iteration_s


@pytest.mark.parametrize(
    "factors", [EVEN, SideFactors(producer=4.0, consumer=1.0), SideFactors(producer=1.0, consumer=4.0)]
)
def test_flip_is_the_best_of_all_by_the_measured_rates(factors):
    cluster, job, standing = case(("A100-40", "r", 4), ("L40S", "r", 4))
    result = make_plan(
        cluster, job, FlipRolesPlanner(standing=standing, factors=factors), MODEL, Budget(evaluations=99)
    )
    check_plan(result.plan, cluster, job)

    problem = Problem(cluster, job, MODEL)
    tools = SearchTools(problem, Balancing())
    index = problem.view.gpu_index
    pools = tuple(tuple(sorted(index[gpu] for gpu in side)) for side in sides(standing))
    others = tuple(task for task in problem.workflow.tasks if task is not RlTask.ACTOR_GENERATION)
    scaled = []
    for flipped in flipped_pools(pools, problem.view.machine_of.tolist()):
        evaluation = tools.pricer.evaluation(tools.seeder.fitted(((RlTask.ACTOR_GENERATION,), others), flipped))
        if evaluation is not None and evaluation.feasible:
            scaled.append(factors.iteration_s(evaluation.phases))
    assert factors.iteration_s(result.report.phases) == pytest.approx(min(scaled))


def test_slow_producer_gets_more_devices_and_a_slow_consumer_too():
    cluster, job, standing = case(("A100-40", "r", 4), ("A100-40", "r", 4))
    shares = {}
    for name, factors in (
        ("producer", SideFactors(producer=9.0, consumer=1.0)),
        ("consumer", SideFactors(producer=1.0, consumer=9.0)),
    ):
        plan = make_plan(
            cluster, job, FlipRolesPlanner(standing=standing, factors=factors), MODEL, Budget(evaluations=99)
        ).plan
        shares[name] = len(sides(plan)[0])
        before, after = (factors.iteration_s(price(cluster, job, p, MODEL).phases) for p in (standing, plan))
        assert after < before
    assert shares["producer"] > shares["consumer"]


def test_flip_keeps_the_limits_of_the_engines():
    cluster, job, standing = case(("A100-40", "r", 2), ("A100-40", "r", 2), ("A100-40", "r", 2))
    limits = Limits({RlTask.ACTOR_TRAINING: TaskLimit(is_on_one_machine=True, most_pp=1)})
    planner = FlipRolesPlanner(standing=standing, factors=SideFactors(producer=1.0, consumer=9.0))
    plan = make_plan(cluster, job, planner, MODEL, Budget(evaluations=99), limits=limits).plan
    assert limits.faults(plan, cluster.view) == []


def test_nothing_to_flip_is_no_plan():
    cluster, job, standing = case(("L40S", "r", 2))
    with pytest.raises(NoIncumbentError):
        make_plan(cluster, job, FlipRolesPlanner(standing=standing, factors=EVEN), MODEL, Budget(evaluations=9))
