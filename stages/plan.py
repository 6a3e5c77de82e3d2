"""Stage plan: decide the placement of an iteration, or keep the one that stands.

A plan gets a number when it differs from its predecessor, and says from which iteration on it is in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from plans.cost import price
from plans.plan import Plan
from plans.spec.cluster import Cluster
from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.contract import StageName
from stages.measured_rates import model_of
from stages.plan_history import NumberedPlan, committed_plans, numbered_plan, plan_of_iteration, with_adoption
from stages.planning import choose_plan
from stages.profile import find_profile, last_due
from stages.sharding import machine_of
from stages.staleness.drift_watch import cheaper_change, has_drifted, have_same_devices, wins_back
from storage import layout
from storage.errors import AlreadyPublishedError
from storage.names import escape_name
from storage.runs import decide_plan, decided_plan, write_plan


def run_stage(context: StageContext) -> StageOutcome:
    """Give the iteration a plan."""
    entry, is_new = ensure_plan(context)
    metrics: dict[str, JsonValue] = {
        "plan": entry.number,
        "method": entry.plan.method,
        "placement": entry.plan.fingerprint,
        "is_new": is_new,
        "predicted": entry.plan.predicted,
        "queues": {stage: [*names] for stage, names in queues_of(entry.plan, context.run.cluster).items()},
    }
    return StageOutcome(reused=not is_new, artefacts=(layout.plan(context.run.name, entry.number),), metrics=metrics)


def ensure_plan(context: StageContext) -> tuple[NumberedPlan, bool]:
    """Return the plan of the iteration, and whether it was made by this call.

    A decision is final: it is kept when the stage is repeated.
    """
    home, run, k = context.home, context.run.name, context.iteration
    decided = decided_plan(home, run, k)
    if decided is not None:
        return numbered_plan(home, run, decided), False
    entry, is_new = _choose(context)
    number = decide_plan(home, run, k, entry.number)
    return (entry, is_new) if number == entry.number else (numbered_plan(home, run, number), False)


def _choose(context: StageContext) -> tuple[NumberedPlan, bool]:
    """Keep the plan in force, or commit another one.

    Numbers grow with the iterations that plans are made for: where overlapping iterations choose at once, the earlier
    one finds the later one's plan committed and keeps the plan that it has.
    """
    home, run, k = context.home, context.run.name, context.iteration
    chosen: Plan | None = None
    changed: Plan | None = None
    while True:
        plans = committed_plans(home, run)
        standing = plan_of_iteration(plans, k)
        if standing is not None:
            is_chosen = standing.adopted_at == k or plans[-1].adopted_at > k
            is_wanted = is_due(context, standing.plan) or has_drifted(context, standing.adopted_at)
            if (is_chosen and is_usable(context, standing.plan)) or not is_wanted:
                return standing, False
        if chosen is None:
            with context.phase("search"):
                if standing is not None and is_usable(context, standing.plan):
                    changed = cheaper_change(context, standing, _profiles(context))
                chosen = changed or choose_plan(
                    context.run.cluster,
                    context.job,
                    profiles=_profiles(context),
                    seed=context.run.seed,
                    drained=context.run.drained,
                    standing=None if standing is None else standing.plan,
                )
        if standing is not None and not (changed or is_better(context, standing.plan, chosen)):
            return standing, False
        try:
            why = reason(context, standing, changed)
            write_plan(home, run, len(plans), with_adoption(chosen, k, why).to_document())
        except AlreadyPublishedError:
            context.log("another iteration took the plan number; choosing again", plan=len(plans))
            continue
        return NumberedPlan(len(plans), k, chosen), True


def queues_of(plan: Plan, cluster: Cluster) -> dict[str, list[str]]:
    """Return the queues that have work in an iteration, by stage; the rows of other queues skip.

    The machine that samples also scores by rules; a reward model scores where it is placed. The first policy is made
    where rank 0 trains it, and evaluated where the first generation replica is.
    """
    machines = {task: {gpu.rpartition("/")[0] for gpu in placed.gpus} for task, placed in plan.tasks.items()}
    generating = machines[RlTask.ACTOR_GENERATION]
    rewarding = machines.get(RlTask.REWARD_INFERENCE, generating)
    wanted = {
        StageName.GENERATE: generating,
        StageName.TRAIN: machines[RlTask.ACTOR_TRAINING],
        StageName.PREPARE: {machine_of(plan.tasks[RlTask.ACTOR_TRAINING], 0)},
        StageName.EVALUATE: {machine_of(plan.tasks[RlTask.ACTOR_GENERATION], 0)},
    }
    if RlTask.CRITIC_TRAINING in machines:  # PPO has a stage for each task
        wanted |= {
            StageName.REWARD_INFERENCE: rewarding,
            StageName.REFERENCE_INFERENCE: machines[RlTask.REFERENCE_INFERENCE],
            StageName.CRITIC_INFERENCE: machines[RlTask.CRITIC_INFERENCE],
            StageName.CRITIC_TRAINING: machines[RlTask.CRITIC_TRAINING],
        }
    else:
        wanted[StageName.INFER] = rewarding | machines.get(RlTask.REFERENCE_INFERENCE, set())
    return {
        stage.value: [machine.queue_name for machine in cluster.machines if machine.name in names]
        for stage, names in wanted.items()
    }


def is_due(context: StageContext, previous: Plan) -> bool:
    """Whether the placement is decided again at this iteration.

    It is every `replan.every` iterations, when cluster or job changed, and when machines were drained or taken back.
    """
    every = context.job.replan.every
    drained = (previous.search.model_extra or {}).get("drained", [])
    has_changed = not is_usable(context, previous) or list(drained) != list(context.run.drained)
    return has_changed or bool(every and context.iteration % every == 0)


def reason(context: StageContext, standing: NumberedPlan | None, changed: Plan | None) -> str:
    """Return why another plan takes the place of the one in force, in words.

    Args:
        context: The plan stage.
        standing: The plan in force; None for the first one.
        changed: The cheaper change of it that is taken because rates drifted; None after a search.
    """
    if standing is None:
        return "the first plan of the run"
    previous = standing.plan
    drained = (previous.search.model_extra or {}).get("drained", [])
    if previous.cluster != context.run.cluster.fingerprint:
        return "the cluster changed"
    if previous.job != context.job.planner.fingerprint:
        return "the job changed"
    if list(drained) != list(context.run.drained):
        return f"drained machines are now {', '.join(context.run.drained) or 'none'}"
    if changed is not None:
        what = "shares of the same replicas" if have_same_devices(previous, changed) else "roles for some devices"
        return f"measured rates left what was promised; other {what}"
    if has_drifted(context, standing.adopted_at):
        return "measured rates left what was promised; planned anew"
    return f"decided again every {context.job.replan.every} iterations, and this one promises to be faster"


def is_better(context: StageContext, standing: Plan, chosen: Plan) -> bool:
    """Whether a new plan takes the place of the one in force.

    It does when the old one can't be used any more (another cluster, a drained machine), else when it promises a gain
    of `replan.min_gain` over the old one, both priced with the rates measured now, and wins back the switch.
    """
    if standing.fingerprint == chosen.fingerprint:
        return False
    if not is_usable(context, standing):
        return True
    model = model_of(context.run.cluster, context.job.planner, _profiles(context))
    before = price(context.run.cluster, context.job.planner, standing, model).iteration_s
    after = price(context.run.cluster, context.job.planner, chosen, model).iteration_s
    if before is None or after is None:
        return before is None
    is_enough = after < before * (1.0 - context.job.replan.min_gain)
    return is_enough and wins_back(context, standing, chosen, before - after)


def is_usable(context: StageContext, plan: Plan) -> bool:
    """Whether a plan belongs to the present cluster and job and uses no drained machine."""
    if (plan.cluster, plan.job) != (context.run.cluster.fingerprint, context.job.planner.fingerprint):
        return False
    machines = {gpu.rpartition("/")[0] for placed in plan.tasks.values() for gpu in placed.gpus}
    return not machines & set(context.run.drained)


def _profiles(context: StageContext) -> Mapping[str, Mapping[str, Any]]:
    number = last_due(context.iteration, context.job.profile.every)
    found = {m.name: find_profile(context, number, escape_name(m.queue_name)) for m in context.run.cluster.machines}
    return {name: document for name, document in found.items() if document is not None}
