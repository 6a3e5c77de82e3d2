"""Stage plan: decide the placement of an iteration, or keep the one that stands.

A plan gets a number when it differs from its predecessor. Which plan an iteration uses stands in its record, which this
stage opens and the report completes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from plans.plan import Plan
from plans.plan_load import plan_from_document
from plans.spec.cluster import Cluster
from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.contract import StageName
from stages.errors import ContractError
from stages.planning import choose_plan
from stages.profile import find_profile, last_due
from storage import layout
from storage.errors import AlreadyPublishedError
from storage.layout import escape_name
from storage.runs import IterationRecord, read_plan, write_iteration, write_plan


def run_stage(context: StageContext) -> StageOutcome:
    """Give the iteration a plan."""
    number, is_reused = ensure_plan(context)
    run, k = context.run.name, context.iteration
    plan = context.plan
    metrics: dict[str, JsonValue] = {
        "plan": number,
        "method": plan.method,
        "placement": plan.fingerprint,
        "is_new": number_of(context, k - 1) != number,
        "predicted": plan.predicted,
        "queues": {stage: [*names] for stage, names in queues_of(plan, context.run.cluster).items()},
    }
    return StageOutcome(
        reused=is_reused, artefacts=(layout.plan(run, number), layout.iteration_record(run, k)), metrics=metrics
    )


def ensure_plan(context: StageContext) -> tuple[int, bool]:
    """Return the number of the iteration's plan, and whether it stood already."""
    standing = number_of(context, context.iteration)
    if standing is not None:
        return standing, True
    previous = number_of(context, context.iteration - 1)
    if previous is None and context.iteration > 0:
        raise ContractError(
            f"run {context.run.name}: iteration {context.iteration - 1} has no plan, so iteration {context.iteration} "
            "can't keep or replace it; run the earlier iteration first."
        )
    number = _decide(context, previous)
    empty = IterationRecord(run=context.run.name, iteration=context.iteration)
    record = context.find_record(context.iteration) or empty
    write_iteration(context.home, record.model_copy(update={"plan": number}))
    return number, False


def queues_of(plan: Plan, cluster: Cluster) -> dict[str, list[str]]:
    """Return the queues that have work in an iteration, by stage; the rows of other queues skip.

    The machine that samples also scores, so `infer` has work wherever generation or the reference policy is placed.
    """
    machines = {task: {gpu.rpartition("/")[0] for gpu in placed.gpus} for task, placed in plan.tasks.items()}
    generating = machines[RlTask.ACTOR_GENERATION]
    wanted = {
        StageName.GENERATE: generating,
        StageName.INFER: generating | machines.get(RlTask.REFERENCE_INFERENCE, set()),
        StageName.TRAIN: machines[RlTask.ACTOR_TRAINING],
    }
    return {
        stage.value: [machine.queue_name for machine in cluster.machines if machine.name in names]
        for stage, names in wanted.items()
    }


def number_of(context: StageContext, iteration: int) -> int | None:
    """Return the number of an iteration's plan, None if it has none."""
    record = context.find_record(iteration) if iteration >= 0 else None
    return None if record is None else record.plan


def is_due(context: StageContext, previous: Plan) -> bool:
    """Whether the placement is decided again at this iteration."""
    every = context.job.replan.every
    has_changed = (previous.cluster, previous.job) != (
        context.run.cluster.fingerprint,
        context.job.planner.fingerprint,
    )
    return has_changed or bool(every and context.iteration % every == 0)


def _decide(context: StageContext, previous_number: int | None) -> int:
    run, home = context.run.name, context.home
    previous = None
    if previous_number is not None:
        previous = plan_from_document(read_plan(home, run, previous_number), f"plan {previous_number} of run {run}")
        if not is_due(context, previous):
            return previous_number
    with context.phase("search"):
        chosen = choose_plan(
            context.run.cluster, context.job.planner, profiles=_profiles(context), seed=context.run.seed
        )
    if previous is not None and previous_number is not None and previous.fingerprint == chosen.fingerprint:
        return previous_number
    number = 0 if previous_number is None else previous_number + 1
    try:
        write_plan(home, run, number, chosen.to_document())
    except AlreadyPublishedError:
        # An earlier attempt chose, and died before it wrote the record: its choice stands.
        context.log("an earlier attempt's plan stands", plan=number)
    return number


def _profiles(context: StageContext) -> Mapping[str, Mapping[str, Any]]:
    number = last_due(context.iteration, context.job.profile.every)
    found = {m.name: find_profile(context, number, escape_name(m.queue_name)) for m in context.run.cluster.machines}
    return {name: document for name, document in found.items() if document is not None}
