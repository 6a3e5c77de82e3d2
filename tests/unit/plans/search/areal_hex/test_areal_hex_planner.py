"""The method end to end on small clusters, and what breaks without repairs 1, 3, 5, 6 and 8."""

from dataclasses import replace

import pytest

from plans.cost import CostModel, price
from plans.cost.model import Fanout
from plans.errors import MemoryInfeasibleError, NoIncumbentError
from plans.plan import check_plan
from plans.search.areal_hex.planner import ArealHexPlanner, SplitPricer
from plans.search.areal_hex.settings import ArealHexSettings, SyncPlace
from plans.search.areal_hex.splits import Split
from plans.search.budget import Budget, Meter
from plans.search.planner import MethodError, make_plan
from plans.search.problem import Problem
from plans.search.run import SearchRun
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_cluster, paper_job

ON = ArealHexSettings()
LIMIT = Budget(evaluations=500)


def pricer_of(cluster, job, model, settings=ON):
    return SplitPricer(Problem(cluster, job, model), SearchRun(meter=Meter(LIMIT), seed=0), settings)


def grpo(size="qwen3-4b", **sections):
    return paper_job(size, algorithm="grpo", mode="async", prompts=48, **sections)


def small():
    return paper_cluster([("A100-40", "r", 8), ("L40S", "r", 8)])


@pytest.mark.parametrize("model", [CostModel.paper(), CostModel.calibrated()], ids=["paper", "calibrated"])
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_plan_is_valid_and_priced_as_the_method_counted(model, algorithm):
    cluster = find_testbed("hetrl-multi-region-hybrid-24").cluster
    job = hetrl_job("4b", algorithm, Mode.ASYNC)
    result = make_plan(cluster, job, "areal-hex", model, LIMIT)
    check_plan(result.plan, cluster, job)
    assert price(cluster, job, result.plan, model) == result.report
    assert result.report.feasible
    assert result.search.trace[-1][2] == pytest.approx(result.iteration_s, rel=1e-12)
    generation = result.plan.tasks[RlTask.ACTOR_GENERATION]
    assert all(len({gpu.split("/")[0] for gpu in s.gpus}) == 1 for r in generation.replicas for s in r.stages)


def test_search_record_says_which_share_of_compute_trains():
    """Repair 2: the share that is asked for is rarely the one that whole GPUs give."""
    cluster = small()
    result = make_plan(cluster, grpo(), "areal-hex", budget=LIMIT)
    share = result.plan.to_document()["search"]["training_compute_fraction"]
    flops = dict(zip(cluster.view.gpu_ids, cluster.view.compute_flop_per_s.tolist(), strict=True))
    training = {gpu for t, p in result.plan.tasks.items() if t is not RlTask.ACTOR_GENERATION for gpu in p.gpus}
    generating = set(result.plan.tasks[RlTask.ACTOR_GENERATION].gpus)
    assert sum(flops[g] for g in training) <= share * sum(flops.values()) * (1 + 1e-9)
    assert sum(flops[g] for g in generating) <= (1 - share) * sum(flops.values()) * (1 + 1e-9)


def test_rounded_shares_finish_later_than_whole_rollouts():
    # Repair 1, the other half: the same replicas, but fractional shares of few rollouts, rounded.
    cluster = paper_cluster([("A100-40", "r", 8), ("L40S", "r", 7)])
    job = paper_job("qwen3-8b", algorithm="grpo", mode="async", prompts=3, responses=7)
    free = {0: list(range(8)), 1: list(range(8, 15))}
    seconds = {
        name: pricer_of(cluster, job, CostModel.calibrated(), settings).rollout.plan(free).seconds
        for name, settings in {"on": ON, "off": replace(ON, whole_rollouts=False)}.items()
    }
    assert seconds["on"] < seconds["off"]


def test_training_keeps_tp_in_a_machine_and_each_stage_on_one_type():
    """H6, H11: tensor parallelism crosses neither GPU types nor machines; pipelines may."""
    cluster = find_testbed("areal-hex-8-24").cluster
    plan = make_plan(cluster, hetrl_job("8b", Algorithm.GRPO, Mode.ASYNC), "areal-hex", budget=LIMIT).plan
    training = plan.tasks[RlTask.ACTOR_TRAINING]
    for j in range(training.pp):
        assert len({gpu.split("-")[0] for r in training.replicas for gpu in r.stages[j].gpus}) == 1
    assert all(len({gpu.split("/")[0] for gpu in s.gpus}) == 1 for r in training.replicas for s in r.stages)


def test_sync_job_is_refused_in_one_sentence():
    with pytest.raises(MethodError, match="areal-hex plans asynchronous jobs only"):
        make_plan(small(), hetrl_job("4b", Algorithm.GRPO, Mode.SYNC), "areal-hex", budget=LIMIT)


def test_job_that_does_not_fit_says_what_is_missing():
    with pytest.raises(MemoryInfeasibleError, match="cheapest change"):
        make_plan(paper_cluster([("L4", "r", 2)]), grpo("qwen3-14b"), "areal-hex", budget=LIMIT)


def test_printed_method_finds_nothing_because_it_starts_with_no_rollout_gpu():
    # Repair 3.
    planner = ArealHexPlanner(settings=ArealHexSettings.printed())
    with pytest.raises(NoIncumbentError, match="areal-hex found no feasible plan"):
        make_plan(small(), grpo(), planner, budget=LIMIT)


def test_all_repairs_are_no_worse_than_the_runnable_printed_method():
    for model in (CostModel.paper(), CostModel.calibrated(), CostModel.calibrated(fanout=Fanout.SEQUENTIAL)):
        for cluster in (small(), find_testbed("hetrl-multi-region-hybrid-16").cluster):
            printed = ArealHexPlanner(settings=ArealHexSettings.runnable_printed())
            old = make_plan(cluster, grpo(), printed, model, LIMIT).iteration_s
            assert make_plan(cluster, grpo(), "areal-hex", model, LIMIT).iteration_s <= old * (1 + 1e-9)


def test_greedy_counts_cost_rollout_time_on_an_odd_machine():
    # Repair 1: greedy fills with the most tokens per GPU and strands what is left of the machine.
    cluster = paper_cluster([("A100-40", "r", 8), ("L40S", "r", 7)])
    free = {1: list(range(8, 15))}
    seconds = {}
    for name, settings in {"on": ON, "off": replace(ON, knapsack_counts=False, whole_rollouts=False)}.items():
        pricer = pricer_of(cluster, grpo("qwen3-8b"), CostModel.calibrated(), settings)
        seconds[name] = pricer.rollout.plan(free).seconds
    assert seconds["on"] < seconds["off"]


def test_update_inside_the_rollout_side_changes_what_is_compared():
    # Repair 5.
    split = Split((8, 0))
    outside = pricer_of(small(), grpo(), CostModel.calibrated()).cost(split)
    inside = pricer_of(small(), grpo(), CostModel.calibrated(), replace(ON, sync_place=SyncPlace.IN_ROLLOUT)).cost(
        split
    )
    update_s = inside.rollout_s - outside.rollout_s
    assert update_s > 0
    assert outside.objective_s == pytest.approx(max(outside.training_s, outside.rollout_s) + update_s)
    assert inside.objective_s == pytest.approx(max(inside.training_s, inside.rollout_s))


def test_expected_length_alone_misjudges_batches_with_a_tail():
    # Repair 6: with a heavy tail a replica's last wave takes as long as its longest answer.
    lengths = {"prompt": 256, "response": 16384, "response_mean": 500.0, "response_std": 1500.0}
    job = grpo().model_copy(update={"lengths": grpo().lengths.model_validate(lengths)})
    free = {1: list(range(8, 16))}
    plans = {
        name: pricer_of(small(), job, CostModel.calibrated(), settings).rollout.plan(free)
        for name, settings in {"on": ON, "off": replace(ON, tail_aware=False)}.items()
    }
    assert plans["on"].seconds < plans["off"].seconds
    slowest = max(plans["off"].replicas, key=lambda r: r.rollouts * r.configuration.rollout_s)
    assert slowest.rollouts * slowest.configuration.rollout_s < 0.8 * plans["off"].seconds


def test_fanout_leaves_distant_rollout_machines_idle_when_each_copy_costs():
    # Repair 8: one sender serves every machine in turn over a slow link.
    cluster = paper_cluster([("A100-40", "r", 8), ("L40S", "s", 4), ("L40S", "s", 4), ("L4", "s", 4)], gbps=0.5)
    model = CostModel.calibrated(fanout=Fanout.SEQUENTIAL)
    on = make_plan(cluster, grpo(), "areal-hex", model, LIMIT)
    off = make_plan(cluster, grpo(), ArealHexPlanner(settings=replace(ON, fanout_aware=False)), model, LIMIT)
    assert on.iteration_s < off.iteration_s
    assert on.report.phases.transfer_s < off.report.phases.transfer_s


def test_direct_updates_favour_fewer_larger_replicas():
    cluster = paper_cluster([("A100-40", "r", 8), ("L40S", "s", 8), ("L40S", "s", 8)], gbps=1)
    model = CostModel.paper()
    on = pricer_of(cluster, grpo(), model)
    off = pricer_of(cluster, grpo(), model, replace(ON, fanout_aware=False))
    split = Split((8, 0, 0))
    on.cost(split)
    off.cost(split)
    assert on.sides(split).iteration_s < off.sides(split).iteration_s
    assert len(on.sides(split).rollout.replicas) < len(off.sides(split).rollout.replicas)


def test_data_parallel_replicas_over_types_are_opt_in_and_no_worse():
    cluster = find_testbed("hetrl-multi-country").cluster
    job = hetrl_job("8b", Algorithm.GRPO, Mode.ASYNC)
    limit = Budget(evaluations=20)
    relaxed = ArealHexPlanner(settings=replace(ON, dp_across_types=True))
    plain = make_plan(cluster, job, "areal-hex", CostModel.paper(), limit)
    assert make_plan(cluster, job, relaxed, CostModel.paper(), limit).iteration_s < plain.iteration_s


def test_flat_rollouts_have_no_pipeline_where_tp_holds_the_model():
    planner = ArealHexPlanner(settings=replace(ON, pipelined_rollouts=False))
    plan = make_plan(find_testbed("areal-hex-h800-24").cluster, grpo(), planner, budget=LIMIT).plan
    assert {len(r.stages) for r in plan.tasks[RlTask.ACTOR_GENERATION].replicas} == {1}
