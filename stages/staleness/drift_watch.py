"""Whether the balance of generation and training has drifted from what the plan in force promised, and what to change.

The cheapest change first: other shares for the same replicas (costs nothing), then other roles for some devices (their
engines start anew), then another placement, which is the plan stage's own search.
"""

from __future__ import annotations

from typing import Final

from plans.cost import price
from plans.plan import Plan
from plans.search.flip_roles import Phases, SideFactors
from plans.workflow import RlTask
from stages.context import StageContext
from stages.measured_rates import Profiles, model_of
from stages.plan_history import NumberedPlan
from stages.planning import flip_roles
from stages.rollout_shards import all_shards
from stages.sharding import shard_ranges
from stages.staleness.balance import (
    CONSUMER_PHASES,
    PRODUCER_PHASES,
    drift_is_due,
    measured_balance,
    predicted_balance,
)
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


def cheaper_change(context: StageContext, standing: NumberedPlan, profiles: Profiles) -> Plan | None:
    """Return the cheapest change of the plan in force that gains enough, short of a new placement.

    None without a drift that calls, and where neither other shares nor other roles gain what they must.
    """
    if not has_drifted(context, standing.adopted_at):
        return None
    return rerouted_plan(context, standing, profiles) or flipped_plan(context, standing, profiles)


def flipped_plan(context: StageContext, standing: NumberedPlan, profiles: Profiles) -> Plan | None:
    """Return the plan in force with other roles for some devices, if that gains enough by the measured rates.

    Enough is a gain of `replan.min_gain` that wins back `replan.switch_s` in the iterations that are left.
    """
    job, run = context.job, context.run
    factors = side_factors(context, standing, profiles)
    if factors is None:
        return None
    found = flip_roles(
        run.cluster, job, standing=standing.plan, factors=factors, profiles=profiles, seed=run.seed, drained=run.drained
    )
    if found is None or found.after_s >= found.before_s * (1.0 - job.replan.min_gain):
        return None
    if not wins_back(context, standing.plan, found.plan, found.before_s - found.after_s):
        return None
    context.log("devices change their roles", before_s=f"{found.before_s:.2f}", after_s=f"{found.after_s:.2f}")
    return found.plan


def wins_back(context: StageContext, before: Plan, after: Plan, gain_s: float) -> bool:
    """Whether a gain per iteration is worth the switch from one plan to another in the iterations that are left.

    Plans that give the same devices the same work differ in shares only, and a switch between them costs nothing.
    """
    if have_same_devices(before, after):
        return True
    return gain_s * (context.run.iterations - context.iteration) > context.job.replan.switch_s


def have_same_devices(before: Plan, after: Plan) -> bool:
    """Whether two plans give every device the same work and so differ in shares only."""
    return _devices(before) == _devices(after)


def side_factors(context: StageContext, standing: NumberedPlan, profiles: Profiles) -> SideFactors | None:
    """Return measured over promised seconds of both sides, of the last iteration that is certainly reported.

    Promised is what the plan in force costs by the model with the rates measured last. None while a side is unknown.
    """
    run, planner = context.run, context.job.planner
    model = model_of(run.cluster, planner, profiles)
    phases = price(run.cluster, planner, standing.plan, model).phases
    try:
        record = read_iteration(context.home, run.name, context.iteration - context.job.generate_ahead - 1)
    except ObjectMissingError:
        return None
    measured = measured_balance(planner.num_samples, record.measured_s)
    promised = None if phases is None else predicted_balance(planner.num_samples, phases_s(phases))
    if measured is None or promised is None:
        return None
    return SideFactors(
        producer=measured.producer_s / promised.producer_s, consumer=measured.consumer_s / promised.consumer_s
    )


def phases_s(phases: Phases) -> dict[str, float]:
    """Return the phases of a priced plan by name."""
    return {name: getattr(phases, name) for name in (*PRODUCER_PHASES, *CONSUMER_PHASES)}


def rerouted_plan(context: StageContext, standing: NumberedPlan, profiles: Profiles) -> Plan | None:
    """Return the plan in force with other shares and their price, if that alone gains enough."""
    job, last = context.job, context.iteration - context.job.generate_ahead - 1
    num_shards = len(shard_ranges(job.prompts_per_iteration, job.prompts_per_shard))
    shards = all_shards(context, last, num_shards, Family.ROLLOUTS)
    found = reroute(standing.plan, replica_rates([shard.manifest for shard in shards]))
    if found is None or found.gain < job.replan.min_gain:
        return None
    context.log("shards are dealt anew", gain=f"{found.gain:.2f}")
    run = context.run
    report = price(run.cluster, job.planner, found.plan, model_of(run.cluster, job.planner, profiles))
    return found.plan.model_copy(update={"predicted": report.to_document()})


def _devices(plan: Plan) -> dict[RlTask, list[list[tuple[int, tuple[str, ...]]]]]:
    """Return the layers and GPUs of every stage of every replica, by task."""
    return {
        task: [[(stage.layers, stage.gpus) for stage in replica.stages] for replica in placed.replicas]
        for task, placed in plan.tasks.items()
    }
