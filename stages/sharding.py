"""Rollout shards: fixed by the job alone; which replica makes which shard comes from the plan.

A shard has a fixed number of prompts, so neither row ids nor the cut into files depend on the placement. A plan only
says how many samples each replica should make; whole shards are dealt out in these proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans.plan import TaskPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRange:
    """The prompts of one shard."""

    shard: int
    """Index of the shard, from 0."""
    first: int
    """Index of its first prompt in the iteration's batch."""
    stop: int
    """Index behind its last prompt."""


def shard_ranges(num_prompts: int, prompts_per_shard: int) -> list[ShardRange]:
    """Cut a batch of prompts into shards; the last one may be smaller.

    Example:
        5 prompts, 2 per shard: [0, 2), [2, 4), [4, 5).
    """
    return [
        ShardRange(shard=index, first=first, stop=min(first + prompts_per_shard, num_prompts))
        for index, first in enumerate(range(0, num_prompts, prompts_per_shard))
    ]


def shards_by_replica(num_shards: int, samples: Sequence[int]) -> list[list[int]]:
    """Deal shards to replicas, in proportion to the samples that the plan gives them.

    Largest remainder method; neighbouring shards go to one replica. With fewer shards than replicas, those with the
    most samples get one.

    Args:
        num_shards: Shards of the iteration.
        samples: Samples of each replica, all > 0.

    Returns:
        Shard indices of each replica. [len(samples)]

    Example:
        4 shards, samples [30, 10]: [[0, 1, 2], [3]].
    """
    total = sum(samples)
    counts = [num_shards * share // total for share in samples]
    remainders = [(num_shards * share % total, -index) for index, share in enumerate(samples)]
    for _, negative in sorted(remainders, reverse=True)[: num_shards - sum(counts)]:
        counts[-negative] += 1
    dealt, start = [], 0
    for count in counts:
        dealt.append(list(range(start, start + count)))
        start += count
    return dealt


def machine_of(task: TaskPlan, replica: int) -> str:
    """Return the machine of a replica's first GPU; it hosts the engine process."""
    return task.replicas[replica].stages[0].gpus[0].rpartition("/")[0]


def local_replicas(task: TaskPlan, machine: str) -> list[int]:
    """Return the indices of the replicas that a machine hosts."""
    return [index for index in range(len(task.replicas)) if machine_of(task, index) == machine]


def waves(shards: Sequence[ShardRange], samples_per_prompt: int, max_samples: int) -> list[list[ShardRange]]:
    """Group a replica's shards into engine calls of at most `max_samples` completions (one shard is always allowed)."""
    grouped: list[list[ShardRange]] = []
    room = 0
    for shard in shards:
        samples = (shard.stop - shard.first) * samples_per_prompt
        if not grouped or samples > room:
            grouped.append([])
            room = max_samples
        grouped[-1].append(shard)
        room -= samples
    return grouped
