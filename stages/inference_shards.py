"""Which committed rollout shards a machine works on in an inference task of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from plans.workflow import RlTask
from stages.context import StageContext
from stages.rollout_shards import Shard, find_in_regions
from stages.sharding import local_replicas, shard_ranges, shards_by_replica
from storage.errors import ObjectMissingError
from storage.rollout_schema import Family


def num_shards_of(context: StageContext) -> int:
    """Return the number of rollout shards of an iteration."""
    return len(shard_ranges(context.job.prompts_per_iteration, context.job.prompts_per_shard))


def dealt_shards(context: StageContext, task: RlTask, num_shards: int) -> dict[int, list[int]]:
    """Return the shards of each replica of a task that this machine hosts, by replica."""
    placed = context.plan.tasks[task]
    dealt = shards_by_replica(num_shards, [replica.samples for replica in placed.replicas])
    return {replica: dealt[replica] for replica in local_replicas(placed, context.machine.name)}


def rollouts_of(context: StageContext, shards: Sequence[int]) -> list[Shard]:
    """Return committed rollout shards.

    Raises:
        ObjectMissingError: some are not committed; all of them are named.
    """
    found = [find_in_regions(context, context.iteration, shard, Family.ROLLOUTS) for shard in shards]
    missing = [str(shard) for shard, entry in zip(shards, found, strict=True) if entry is None]
    if missing:
        raise ObjectMissingError(
            f"run {context.run.name}, iteration {context.iteration}: rollout shards {', '.join(missing)} are not "
            "committed; repeat stage generate."
        )
    return [entry for entry in found if entry is not None]
