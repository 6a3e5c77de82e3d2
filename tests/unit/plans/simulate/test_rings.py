"""Ring orders of the simulator, and plans that need a forbidden link."""

from __future__ import annotations

from itertools import pairwise

import pytest

from plans.errors import NoRouteError
from plans.simulate import SimulationSettings, simulate
from plans.simulate.rings import ring_order
from plans.spec.cluster import Cluster
from plans.spec.load import load_cluster
from plans.workflow import RlTask
from tests.unit.plans.simulate.builders import UNIT_GPU, job_of, plan_of, task_plan


def star() -> Cluster:
    """Regions a, b (two GPUs) and c; a and c may not talk to each other."""
    machines = "\n".join(
        f"  - {{name: {name}, region: {name}, gpu: unit, count: {count}, intra_gb_s: 1000}}"
        for name, count in (("a", 1), ("c", 1), ("b", 2))
    )
    return load_cluster(
        f"""
format: motley.cluster/1
name: star
gpu_types: {{unit: {UNIT_GPU}}}
machines:
{machines}
links:
  same_zone: {{latency_ms: 0, bandwidth_gbps: 8}}
  regions:
    - {{between: [a, b], latency_ms: 0, bandwidth_gbps: 8}}
    - {{between: [b, c], latency_ms: 0, bandwidth_gbps: 8}}
    - {{between: [a, c], forbidden: true}}
""",
        "cluster",
    )


def trained_on(replicas: list[str]) -> float:
    """Return the seconds of an iteration with one training replica on each GPU named."""
    cluster, job = star(), job_of()
    alone = task_plan([[["b/0"]]], [8], [4])
    tasks = {RlTask.ACTOR_GENERATION: alone, RlTask.REFERENCE_INFERENCE: alone}
    samples = [8 - 2 * (len(replicas) - 1)] + [2] * (len(replicas) - 1)
    tasks[RlTask.ACTOR_TRAINING] = task_plan([[[gpu]] for gpu in replicas], samples, [4])
    return simulate(cluster, job, plan_of(cluster, job, tasks), SimulationSettings(iterations=1)).iteration_s[0]


def test_ranks_are_in_order_unless_a_link_is_forbidden() -> None:
    assert ring_order([3, 1, 2, 0], lambda _a, _b: True) == [0, 1, 2, 3]
    barred = {(0, 1), (1, 0)}
    ring = ring_order([0, 1, 2, 3], lambda a, b: (a, b) not in barred)
    assert sorted(ring) == [0, 1, 2, 3]
    assert all((a, b) not in barred for a, b in pairwise([*ring, ring[0]]))


def test_a_ring_without_any_permitted_order_keeps_the_ranks() -> None:
    assert ring_order([2, 0, 1], lambda a, b: {a, b} != {0, 1}) == [0, 1, 2]


def test_a_ring_goes_around_a_forbidden_link() -> None:
    assert trained_on(["a/0", "c/0", "b/0", "b/1"]) > 0.0


def test_a_plan_that_needs_a_forbidden_link_is_refused_with_both_ends() -> None:
    with pytest.raises(NoRouteError, match=r"from ([ac]/0) to (?!\1)[ac]/0, but the cluster forbids"):
        trained_on(["a/0", "c/0"])
