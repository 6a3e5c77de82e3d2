"""Limits of the engines: what a plan may not ask for is not in the search space, and never comes out of a search."""

from dataclasses import replace

import pytest

from plans.cost import CostModel
from plans.errors import NoIncumbentError
from plans.plan import PipelineStage, Replica, TaskPlan, check_plan
from plans.search.budget import Budget
from plans.search.layouts import TaskLayout
from plans.search.limits import NO_LIMITS, Limits, TaskLimit
from plans.search.planner import make_plan
from plans.search.problem import Problem
from plans.search.random_layout import random_layout
from plans.search.seeds import draws
from plans.search.sha_ea import ShaEaPlanner
from plans.spec.job import Algorithm, Mode
from plans.spec.load import cluster_from_document
from plans.testbeds.jobs import hetrl_job
from plans.workflow import RlTask, workflow_of

ONE_DEVICE = TaskLimit(most_pp=1, most_tp=1)
ONE_MACHINE = TaskLimit(is_on_one_machine=True, most_pp=1, most_tp=8)


def small_cluster():
    machines = [
        {"name": f"m{index}", "region": "r", "gpu": gpu, "count": 4, "intra_gb_s": 300}
        for index, gpu in enumerate(("A100-80", "A100-80", "L40S"))
    ]
    links = {"same_zone": {"latency_ms": 0, "bandwidth_gbps": 100}}
    document = {"format": "motley.cluster/1", "name": "c", "machines": machines, "links": links}
    return cluster_from_document(document, "cluster")


def small_job(algorithm=Algorithm.GRPO, mode=Mode.SYNC):
    return hetrl_job("4b", algorithm, mode)


def limits_of(job):
    return Limits({t: ONE_MACHINE if t is RlTask.ACTOR_TRAINING else ONE_DEVICE for t in workflow_of(job).tasks})


@pytest.mark.parametrize(("mode", "workers"), [(Mode.SYNC, 1), (Mode.ASYNC, 1), (Mode.SYNC, 2)])
def test_search_under_limits_finds_a_plan_that_keeps_them(mode, workers):
    cluster, job = small_cluster(), small_job(mode=mode)
    limits = Limits({RlTask.ACTOR_TRAINING: TaskLimit(is_on_one_machine=True)})

    result = make_plan(cluster, job, budget=Budget(evaluations=150), seed=3, workers=workers, limits=limits)

    check_plan(result.plan, cluster, job)
    machines = {gpu.rpartition("/")[0] for gpu in result.plan.tasks[RlTask.ACTOR_TRAINING].gpus}
    assert len(machines) == 1
    assert limits.faults(result.plan, cluster.view) == []


def test_free_search_uses_what_the_limits_forbid():
    """Otherwise the test above would show nothing."""
    cluster, job = small_cluster(), small_job()
    free = make_plan(cluster, job, budget=Budget(evaluations=150), seed=3).plan
    assert Limits({RlTask.ACTOR_TRAINING: TaskLimit(is_on_one_machine=True)}).faults(free, cluster.view) == [
        "actor_training stays on one machine"
    ]


def test_limits_that_no_placement_keeps_are_named_in_the_refusal():
    """A model that needs several GPUs, engines that use one each."""
    cluster, job = small_cluster(), hetrl_job("14b", Algorithm.GRPO, Mode.SYNC)
    with pytest.raises(NoIncumbentError, match=r"within the limits of the engines \(.*actor_training .*tp <= 1"):
        make_plan(
            cluster, job, budget=Budget(evaluations=60), limits=Limits({RlTask.ACTOR_TRAINING: ONE_DEVICE})
        )  # fmt: skip


def test_a_method_that_does_not_know_limits_returns_no_plan_that_breaks_them():
    class Careless:
        """Searches as if nothing were limited."""

        name = "careless"

        def search(self, problem, run):
            return ShaEaPlanner().search(replace(problem, limits=NO_LIMITS), run)

    cluster, job = small_cluster(), small_job()
    limits = Limits({RlTask.ACTOR_TRAINING: TaskLimit(is_on_one_machine=True)})
    with pytest.raises(NoIncumbentError, match="actor_training stays on one machine"):
        make_plan(cluster, job, Careless(), budget=Budget(evaluations=150), seed=3, limits=limits)


def test_random_layouts_keep_the_limits():
    cluster, job = small_cluster(), small_job()
    problem = Problem(cluster, job, CostModel.paper(), limits_of(job))
    rng = draws(0, "test")
    gpus = range(cluster.view.num_gpus)
    for task in problem.workflow.tasks:
        for _ in range(50):
            layout = random_layout(problem, task, gpus, rng)
            assert problem.limits.allows(task, layout, cluster.view)
            assert len(layout.gpus) == len(set(layout.gpus)) == layout.dp * layout.pp * layout.tp


def test_tasks_that_must_share_a_machine_do():
    cluster, job = small_cluster(), small_job(Algorithm.PPO)
    training = frozenset({RlTask.ACTOR_TRAINING, RlTask.CRITIC_TRAINING})
    limits = Limits({task: TaskLimit(is_on_one_machine=True) for task in training}, together=training)
    plan = make_plan(cluster, job, budget=Budget(evaluations=150), seed=3, limits=limits).plan
    assert len({gpu.partition("/")[0] for task in training for gpu in plan.tasks[task].gpus}) == 1
    assert limits.faults(plan, cluster.view) == []
    assert "actor_training and critic_training share a machine" in limits.sentence()


def test_thread_types_are_free_of_the_bound_on_tensor_shards():
    limit = TaskLimit(most_tp=1, thread_types=frozenset({"cpu"}))
    layout = TaskLayout(1, 1, 2, (0, 1))
    assert limit.allows(layout, lambda _gpu: 0, lambda _gpu: "cpu")
    assert not limit.allows(layout, lambda _gpu: 0, lambda _gpu: "H100")
    assert not limit.allows(layout, lambda gpu: gpu, lambda _gpu: "cpu")  # a stage over two machines


def test_degree_that_does_not_divide_the_heads_is_no_plan_and_is_named():
    cluster, job = small_cluster(), small_job()
    limits = Limits({RlTask.ACTOR_TRAINING: TaskLimit(is_on_one_machine=True, tp_divides=2, has_equal_stages=True)})

    plan = make_plan(cluster, job, budget=Budget(evaluations=150), seed=3, limits=limits).plan

    assert plan.tasks[RlTask.ACTOR_TRAINING].tp in (1, 2)
    limit = limits.tasks[RlTask.ACTOR_TRAINING]
    assert [tp for tp in range(1, 9) if limit.allows_tp(tp, ("A100-80",))] == [1, 2]
    assert limits.sentence() == (
        "actor_training stays on one machine, tp divides 2, has the same layers per stage in every replica"
    )


def test_replicas_that_cut_the_model_elsewhere_are_refused_where_gradients_are_summed():
    cluster, job = small_cluster(), small_job()
    task = RlTask.ACTOR_TRAINING
    plan = make_plan(cluster, job, budget=Budget(evaluations=20), seed=3, limits=limits_of(job)).plan
    gpus = [f"m0/{index}" for index in range(4)]

    def placed(*layers):
        replicas = tuple(
            Replica(
                samples=1,
                stages=tuple(
                    PipelineStage(layers=count, gpus=(gpus[2 * replica + stage],)) for stage, count in enumerate(counts)
                ),
            )
            for replica, counts in enumerate(layers)
        )
        return plan.model_copy(update={"tasks": {**plan.tasks, task: TaskPlan(dp=2, pp=2, tp=1, replicas=replicas)}})

    limits = Limits({task: TaskLimit(has_equal_stages=True)})
    assert limits.faults(placed((20, 16), (20, 16)), cluster.view) == []
    assert limits.faults(placed((20, 16), (16, 20)), cluster.view) == [
        "actor_training keeps each stage on one machine, has the same layers per stage in every replica"
    ]
