"""Whether the balance of generation and training has drifted from what the plan in force promised."""

from __future__ import annotations

from typing import Final

from plans.plan import Plan
from stages.context import StageContext
from stages.plan_history import NumberedPlan
from stages.rollout_shards import all_shards
from stages.sharding import shard_ranges
from stages.staleness.balance import drift_is_due
from stages.staleness.reroute import replica_rates, reroute
from storage.errors import ObjectMissingError
from storage.rollout_schema import Family
from storage.runs import read_iteration

DRIFT_METRIC: Final = "balance_drift"
"""Metric of an iteration record: `stages.staleness.balance.drift` of that iteration."""


def has_drifted(context: StageContext, adopted_at: int) -> bool:
    """Whether the plan that iteration `adopted_at` adopted is to be decided again at this iteration.

    Looked at is what is certainly reported when the iteration begins, so that a repeated plan stage sees the same.
    Only asynchronous runs have two sides to balance.
    """
    job, k = context.job, context.iteration
    if not job.generate_ahead:
        return False
    drifts: list[float] = []
    for iteration in range(adopted_at, k - job.generate_ahead):
        try:
            value = read_iteration(context.home, context.run.name, iteration).metrics.get(DRIFT_METRIC)
        except ObjectMissingError:
            break
        if value is not None:
            drifts.append(value)
    return drift_is_due(drifts, limit=job.replan.drift, confirm=job.replan.confirm)


def rerouted_plan(context: StageContext, standing: NumberedPlan | None) -> Plan | None:
    """Return the plan in force with other shares, if drift calls and that alone gains enough: the cheapest change."""
    if standing is None or not has_drifted(context, standing.adopted_at):
        return None
    job, last = context.job, context.iteration - context.job.generate_ahead - 1
    num_shards = len(shard_ranges(job.prompts_per_iteration, job.prompts_per_shard))
    shards = all_shards(context, last, num_shards, Family.ROLLOUTS)
    found = reroute(standing.plan, replica_rates([shard.manifest for shard in shards]))
    if found is None or found.gain < job.replan.min_gain:
        return None
    context.log("shards are dealt anew", gain=f"{found.gain:.2f}")
    return found.plan
