from __future__ import annotations

import pytest

from plans.errors import MemoryInfeasibleError, TooFewGpusError
from plans.spec.cluster import Cluster, LinkRate, Links, Machine, single_machine
from plans.spec.job import Job
from plans.spec.load import load_cluster, load_job
from plans.workflow import RlTask
from stages.contract import StageName
from stages.plan import queues_of
from stages.planning import choose_plan


def job(shape: str = "qwen3-0.6b", mode: str = "sync", staleness: int = 0) -> Job:
    return load_job(
        f"""
format: motley.job/1
name: j
algorithm: grpo
mode: {mode}
max_staleness: {staleness}
models: {{actor: {{shape: {shape}}}, reference: {{shape: {shape}}}, reward: {{verifier: math}}}}
batch: {{prompts: 5, responses_per_prompt: 3}}
lengths: {{prompt: 8, response: 8}}
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


def test_queues_with_work_follow_from_the_plan() -> None:
    machines = (
        Machine(name="weak", region="r", gpu="cpu", count=1, queue="q-weak"),
        Machine(name="strong", region="r", gpu="cpu", count=4, intra_gb_s=10, queue="q-strong"),
    )
    links = Links(same_zone=LinkRate(latency_ms=0, bandwidth_gbps=10))
    cluster = Cluster(name="c", machines=machines, links=links)

    plan = choose_plan(cluster, job(), profiles={}, seed=0)

    stages = (StageName.GENERATE, StageName.INFER, StageName.TRAIN)
    assert queues_of(plan, cluster) == {stage.value: ["q-strong"] for stage in stages}
