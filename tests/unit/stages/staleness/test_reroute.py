from __future__ import annotations

from typing import Any

import pytest

from plans.cost import CostModel
from plans.plan import Plan, check_plan
from plans.spec.load import load_cluster, load_job
from plans.workflow import RlTask
from stages.single_machine_plan import plan_on_machine
from stages.staleness.reroute import replica_rates, reroute
from storage.manifest import Manifest, Part

CLUSTER = load_cluster(
    """
format: motley.cluster/1
name: two
machines: [{name: m, region: r, gpu: A100-40, count: 4, intra_gb_s: 600}]
""",
    "cluster",
)
JOB = load_job(
    """
format: motley.job/1
name: j
algorithm: grpo
mode: async
max_staleness: 1
models: {actor: {shape: qwen3-0.6b}, reference: {shape: qwen3-0.6b}, reward: {verifier: math}}
batch: {prompts: 25, responses_per_prompt: 4}
lengths: {prompt: 64, response: 64}
""",
    "job",
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = plan_on_machine(CLUSTER, JOB, CLUSTER.machines[0], CostModel.paper())
    assert [replica.samples for replica in found.tasks[RlTask.ACTOR_GENERATION].replicas] == [50, 50]
    return found


def samples(plan: Plan) -> list[int]:
    return [replica.samples for replica in plan.tasks[RlTask.ACTOR_GENERATION].replicas]


def test_shares_follow_the_measured_rates_and_the_plan_stays_valid(plan: Plan) -> None:
    """Rates 3 to 1: 75 and 25 of 100 completions; the slower replica took 50 s, both take 25 s now."""
    found = reroute(plan, {0: 3.0, 1: 1.0})

    assert found is not None
    assert samples(found.plan) == [75, 25]
    assert found.gain == pytest.approx(1.0)
    check_plan(found.plan, CLUSTER, JOB, source_name="rerouted")
    assert found.plan.tasks[RlTask.ACTOR_TRAINING] == plan.tasks[RlTask.ACTOR_TRAINING]


def test_equal_rates_change_nothing(plan: Plan) -> None:
    found = reroute(plan, {0: 2.0, 1: 2.0})
    assert found is not None
    assert (samples(found.plan), found.gain) == ([50, 50], 0.0)


def test_every_replica_keeps_a_sample(plan: Plan) -> None:
    found = reroute(plan, {0: 1e6, 1: 1e-6})
    assert found is not None
    assert samples(found.plan) == [99, 1]


@pytest.mark.parametrize("rates", [{}, {0: 1.0}, {0: 1.0, 2: 1.0}])
def test_unknown_rates_shift_nothing(plan: Plan, rates: dict[int, float]) -> None:
    assert reroute(plan, rates) is None


def shard(rows: int, **metadata: Any) -> Manifest:
    part = Part(name="rows.parquet", path="x", size=1, sha256="0" * 64, rows=rows)
    return Manifest(
        kind="rollouts", key="k", attempt="a", parts=(part,), schema_version=2, policy_versions=(0,),
        input_fingerprint="f", content_digest="d", created_by="t", metadata=metadata,
    )  # fmt: skip


def test_rates_count_each_engine_call_once() -> None:
    """Two shards of one call share its time; a second call adds its own."""
    shards = [
        shard(10, replica=0, started_at=0.0, ended_at=2.0),
        shard(10, replica=0, started_at=0.0, ended_at=2.0),
        shard(20, replica=0, started_at=5.0, ended_at=8.0),
        shard(10, replica=1, started_at=0.0, ended_at=5.0),
        shard(10, replica=2),
    ]
    assert replica_rates(shards) == {0: 8.0, 1: 2.0}
