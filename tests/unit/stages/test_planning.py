from __future__ import annotations

import pytest

from plans.cost import CostModel
from plans.cost.calibration import DEFAULT_COMPUTE, DEFAULT_HBM, Calibration
from plans.errors import MemoryInfeasibleError, TooFewGpusError
from plans.spec.cluster import Cluster, LinkRate, Links, Machine, single_machine
from plans.spec.load import load_cluster
from plans.workflow import RlTask, TaskKind
from stages.contract import StageName
from stages.engine_limits import engine_limits
from stages.errors import SpecFaultsError
from stages.measured_rates import calibration_of
from stages.plan import queues_of
from stages.planning import EVALUATIONS, choose_plan
from stages.single_machine_plan import plan_on_machine
from stages.spec.job import TrainingJob, load_training_job, training_job_from_document
from tests.helpers.gang_plans import pipeline_over


def job(shape: str = "qwen3-0.6b", mode: str = "sync", staleness: int = 0, engine: str = "accelerate") -> TrainingJob:
    return load_training_job(
        f"""
format: motley.job/1
name: j
algorithm: grpo
mode: {mode}
max_staleness: {staleness}
models: {{actor: {{shape: {shape}}}, reference: {{shape: {shape}}}, reward: {{verifier: math}}}}
batch: {{prompts: 5, responses_per_prompt: 3}}
lengths: {{prompt: 8, response: 8}}
source: {{type: hf, path: some/model}}
data: {{source: "arithmetic:addition"}}
rewards: {{terms: [{{name: math_verify}}]}}
grpo: {{kl: {{weight: 0.01}}}}
engines: {{training: {{name: {engine}}}}}
""",
        "job",
    )


def test_cpu_machine_runs_each_task_in_one_process_with_all_threads() -> None:
    cluster = single_machine("cpu", 2)

    plan = choose_plan(cluster, job(), profiles={}, seed=0)

    assert {task: (placed.dp, placed.pp, placed.tp) for task, placed in plan.tasks.items()} == dict.fromkeys(
        (RlTask.ACTOR_GENERATION, RlTask.REFERENCE_INFERENCE, RlTask.ACTOR_TRAINING), (1, 1, 2)
    )
    assert plan == choose_plan(cluster, job(), profiles={}, seed=1)


def test_gpu_machine_gets_replicas_whose_samples_add_up() -> None:
    plan = choose_plan(single_machine("A100-80", 2), job(), profiles={}, seed=0)

    assert [replica.samples for replica in plan.tasks[RlTask.ACTOR_GENERATION].replicas] == [8, 7]
    assert plan.tasks[RlTask.ACTOR_TRAINING].tp == 1


def test_model_that_fits_on_no_machine_is_refused_with_both_numbers() -> None:
    cluster = load_cluster(
        """
format: motley.cluster/1
name: c
gpu_types: {small: {memory_gb: 12, tflops: 100, hbm_gb_s: 900, usd_per_hour: 1}}
machines: [{name: m, region: r, gpu: small, count: 2, intra_gb_s: 50}]
""",
        "c",
    )

    assert choose_plan(cluster, job(), profiles={}, seed=0).tasks[RlTask.ACTOR_GENERATION].tp == 1
    with pytest.raises(
        MemoryInfeasibleError, match=r"reference_inference needs 16\.4 GB, but 2 GPUs of m have 11\.4 GB"
    ):
        choose_plan(cluster, job("qwen3-8b"), profiles={}, seed=0)


def test_async_mode_keeps_generation_apart() -> None:
    plan = choose_plan(single_machine("cpu", 3), job(mode="async", staleness=1), profiles={}, seed=0)

    assert [group.gpus for group in plan.groups] == [("local/0",), ("local/1", "local/2")]
    with pytest.raises(TooFewGpusError, match="in async mode generation shares no GPU with training"):
        choose_plan(single_machine("cpu", 1), job(mode="async", staleness=1), profiles={}, seed=0)


def two_machines(gpu: str = "cpu") -> Cluster:
    machines = (
        Machine(name="weak", region="r", gpu=gpu, count=1, queue="q-weak"),
        Machine(name="strong", region="r", gpu=gpu, count=1, queue="q-strong"),
    )
    links = Links(same_zone=LinkRate(latency_ms=0, bandwidth_gbps=10))
    return Cluster(name="c", machines=machines, links=links)


def with_addresses(cluster: Cluster, *names: str) -> Cluster:
    machines = tuple(
        machine.model_copy(update={"address": f"{machine.name}.example.org"}) if machine.name in names else machine
        for machine in cluster.machines
    )
    return Cluster(name=cluster.name, machines=machines, links=cluster.links)


PLANNED = (StageName.PREPARE, StageName.GENERATE, StageName.INFER, StageName.TRAIN, StageName.EVALUATE)
PROFILES = {
    name: {"flop_per_s": {"fp32": 4e10 * count, "bf16": 5e10 * count}, "memory_bytes_per_s": 1e10 * count}
    for name, count in (("weak", 1), ("strong", 1))
}


def test_plan_of_several_machines_is_searched_within_the_limits_of_the_engines() -> None:
    cluster, chosen = two_machines("A100-80"), job(mode="async", staleness=1)

    plan = choose_plan(cluster, chosen, profiles=PROFILES, seed=3)

    assert plan == choose_plan(cluster, chosen, profiles=PROFILES, seed=3)
    extra = plan.search.model_extra or {}
    assert (plan.method, plan.search.seed, plan.search.evaluations) == ("sha-ea", 3, EVALUATIONS)
    assert (extra["budget"], extra["model"]) == ("1000evals", "calibrated: profiles of weak, strong")
    assert "actor_training stays on one machine" in extra["limits"]
    assert engine_limits(chosen, cluster).faults(plan, cluster.view) == []
    queues = queues_of(plan, cluster)  # generation shares no device with training, and each machine has one
    assert sorted(queues["generate"] + queues["train"]) == ["q-strong", "q-weak"]
    assert (queues["prepare"], queues["evaluate"]) == (queues["train"], queues["generate"])


def test_megatron_trains_on_as_many_cpu_processes_as_divide_the_heads() -> None:
    """qwen3-0.6b has 16 heads, 8 key-value heads and 3072 feed-forward units: of 6 cores a stage takes 4."""
    plan = choose_plan(single_machine("cpu", 6), job(engine="megatron"), profiles={}, seed=0)

    assert (plan.tasks[RlTask.ACTOR_TRAINING].dp, plan.tasks[RlTask.ACTOR_TRAINING].tp) == (1, 4)
    assert plan.tasks[RlTask.ACTOR_GENERATION].tp == 6


def test_megatron_splits_on_gpus_what_does_not_fit_one() -> None:
    document = """
format: motley.cluster/1
name: c
gpu_types: {small: {memory_gb: 80, tflops: 100, hbm_gb_s: 900, usd_per_hour: 1}}
machines: [{name: m, region: r, gpu: small, count: 4, intra_gb_s: 50}]
"""
    cluster = load_cluster(document, "c")

    with pytest.raises(MemoryInfeasibleError, match="actor_training needs"):
        choose_plan(cluster, job("qwen3-8b"), profiles={}, seed=0)
    assert (
        choose_plan(cluster, job("qwen3-8b", engine="megatron"), profiles={}, seed=0).tasks[RlTask.ACTOR_TRAINING].tp
        == 2
    )


def test_searched_plan_of_megatron_has_degrees_that_divide_the_heads() -> None:
    links = Links(same_zone=LinkRate(latency_ms=0, bandwidth_gbps=10))
    machines = tuple(
        Machine(name=name, region="r", gpu="A100-80", count=3, queue=f"q-{name}", intra_gb_s=300) for name in "ab"
    )
    cluster, chosen = Cluster(name="c", machines=machines, links=links), job(engine="megatron")

    plan = choose_plan(cluster, chosen, profiles={}, seed=3)

    limits = engine_limits(chosen, cluster)
    assert "actor_training stays on one machine, tp divides 8" in limits.sentence()
    assert limits.faults(plan, cluster.view) == []


def test_training_may_spread_over_machines_that_all_have_addresses() -> None:
    cluster, chosen = two_machines("A100-80"), job(engine="megatron")
    reachable = with_addresses(cluster, "weak", "strong")

    assert "actor_training stays on one machine" in engine_limits(chosen, cluster).sentence()
    assert "actor_training stays on one machine" in engine_limits(chosen, with_addresses(cluster, "weak")).sentence()
    assert "actor_training keeps each stage on one machine, tp divides 8" in engine_limits(chosen, reachable).sentence()
    assert reachable.fingerprint == cluster.fingerprint


def test_gang_has_a_row_on_every_machine_and_its_first_version_a_row_on_the_lead() -> None:
    cluster = with_addresses(two_machines("A100-80"), "weak", "strong")
    alone = plan_on_machine(cluster, job().planner, cluster.machines[0], CostModel.calibrated())
    replica = alone.tasks[RlTask.ACTOR_TRAINING].replicas[0]
    replicas = tuple(
        replica.model_copy(update={"stages": (replica.stages[0].model_copy(update={"gpus": (device,)}),)})
        for device in ("strong/0", "weak/0")
    )
    training = alone.tasks[RlTask.ACTOR_TRAINING].model_copy(update={"dp": 2, "tp": 1, "replicas": replicas})
    plan = alone.model_copy(update={"tasks": {**alone.tasks, RlTask.ACTOR_TRAINING: training}})

    queues = queues_of(plan, cluster)

    assert (queues["train"], queues["prepare"], queues["generate"]) == (
        ["q-weak", "q-strong"],
        ["q-strong"],
        ["q-weak"],
    )


def test_precision_that_megatron_lacks_is_refused_with_the_job() -> None:
    document = job(engine="megatron").to_document()
    document["training"]["precision"] = "bf16"

    with pytest.raises(SpecFaultsError, match=r"training\.precision is bf16, but engine megatron keeps"):
        training_job_from_document(document, "job")


def test_queues_with_work_follow_from_the_plan() -> None:
    """H1, H2: which machine type does which task is the plan's, and every task has its queue."""
    cluster = two_machines()

    queues = queues_of(plan_on_machine(cluster, job().planner, cluster.machines[1], CostModel.calibrated()), cluster)

    assert queues == {stage.value: ["q-strong"] for stage in PLANNED}


def test_gang_of_unlike_gpus_has_the_queue_of_each_of_its_machines() -> None:
    """H8: instance types are mixed in one gang; each member's task runs where its machine's worker listens."""
    machines = (
        Machine(name="weak", region="r", gpu="L40S", count=1, queue="q-weak", address="weak.example.org"),
        Machine(name="strong", region="r", gpu="A100-80", count=1, queue="q-strong", address="strong.example.org"),
    )
    cluster = Cluster(name="c", machines=machines, links=Links(same_zone=LinkRate(latency_ms=0, bandwidth_gbps=10)))

    queues = queues_of(pipeline_over(cluster, job(engine="megatron"), ("strong", "weak")), cluster)

    assert queues["train"] == ["q-weak", "q-strong"]
    assert queues["generate"] == queues["prepare"] == ["q-strong"]


def test_drained_machine_gets_nothing_and_the_plan_still_belongs_to_the_whole_cluster() -> None:
    cluster = two_machines()

    plan = choose_plan(cluster, job(), profiles={}, seed=0, drained=("strong",))

    assert queues_of(plan, cluster)["generate"] == queues_of(plan, cluster)["train"] == ["q-weak"]
    assert plan.cluster == cluster.fingerprint
    with pytest.raises(TooFewGpusError, match="every machine is drained"):
        choose_plan(cluster, job(), profiles={}, seed=0, drained=("strong", "weak"))


def test_measured_rates_scale_the_built_in_efficiencies() -> None:
    cluster = two_machines()

    found = calibration_of(cluster, job().planner, {"strong": PROFILES["strong"]}).of("cpu")

    stated = cluster.gpu_type("cpu")
    assert found.compute.training == pytest.approx(DEFAULT_COMPUTE[TaskKind.TRAINING] * 5e10 / (stated.tflops * 1e12))
    assert found.hbm == pytest.approx(DEFAULT_HBM * 1e10 / (stated.hbm_gb_s * 1e9))
    assert calibration_of(cluster, job().planner, {}) == Calibration()
