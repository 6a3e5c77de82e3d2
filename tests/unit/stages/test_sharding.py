from __future__ import annotations

import pytest

from plans.plan import PipelineStage, Replica, TaskPlan
from stages.sharding import ShardRange, local_replicas, machine_of, shard_ranges, shards_by_replica, waves


def shard(index: int, first: int, stop: int) -> ShardRange:
    return ShardRange(shard=index, first=first, stop=stop)


def test_shard_ranges_cut_a_batch_in_order() -> None:
    assert shard_ranges(5, 2) == [shard(0, 0, 2), shard(1, 2, 4), shard(2, 4, 5)]


@pytest.mark.parametrize(
    ("num_shards", "samples", "expected"),
    [
        (4, [30, 10], [[0, 1, 2], [3]]),
        (4, [1], [[0, 1, 2, 3]]),
        (1, [10, 30], [[], [0]]),
        (3, [10, 10], [[0, 1], [2]]),
        (7, [5, 1, 4], [[0, 1, 2], [3], [4, 5, 6]]),
    ],
)
def test_shards_follow_the_samples_of_the_plan(num_shards: int, samples: list[int], expected: list[list[int]]) -> None:
    dealt = shards_by_replica(num_shards, samples)

    assert dealt == expected
    assert [index for part in dealt for index in part] == list(range(num_shards))


def test_waves_fill_an_engine_call_with_whole_shards() -> None:
    shards = shard_ranges(5, 1)

    assert [[s.shard for s in wave] for wave in waves(shards, 4, 8)] == [[0, 1], [2, 3], [4]]
    assert [[s.shard for s in wave] for wave in waves(shards, 4, 3)] == [[0], [1], [2], [3], [4]]


def test_replicas_belong_to_the_machine_of_their_first_gpu() -> None:
    replicas = tuple(
        Replica(samples=1, stages=(PipelineStage(layers=1, gpus=(f"{machine}/0",)),)) for machine in ("a", "b.c", "a2")
    )
    task = TaskPlan(dp=3, pp=1, tp=1, replicas=replicas)

    assert [machine_of(task, index) for index in range(3)] == ["a", "b.c", "a2"]
    assert local_replicas(task, "a") == [0]
