"""The plans of a run, numbered from 0. Which one an iteration uses is a decision of its plan stage, committed once.

Iterations overlap in async mode, so the decision of one must not follow from what another one has committed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from plans.plan import Plan
from plans.plan_load import plan_from_document
from storage.errors import ObjectMissingError
from storage.runs import read_plan
from storage.store import Store

ADOPTED_AT = "adopted_at"
"""Field of a plan's search record: the first iteration that uses it."""

ADOPTED_BECAUSE = "adopted_because"
"""Field of a plan's search record: why it came into force, in words."""


@dataclass(frozen=True, slots=True)
class NumberedPlan:
    """A committed plan."""

    number: int
    """Plan number."""
    adopted_at: int
    """First iteration that uses it."""
    plan: Plan
    """The plan."""


def committed_plans(store: Store, run: str) -> list[NumberedPlan]:
    """Return all plans of a run, oldest first; numbers have no gaps, so nothing is listed."""
    found: list[NumberedPlan] = []
    while True:
        try:
            found.append(numbered_plan(store, run, len(found)))
        except ObjectMissingError:
            return found


def numbered_plan(store: Store, run: str, number: int) -> NumberedPlan:
    """Return a committed plan; raises `ObjectMissingError` where there is none of that number."""
    plan = plan_from_document(read_plan(store, run, number), f"plan {number} of run {run}")
    return NumberedPlan(number, int((plan.search.model_extra or {}).get(ADOPTED_AT, 0)), plan)


def plan_of_iteration(plans: list[NumberedPlan], iteration: int) -> NumberedPlan | None:
    """Return the plan in force when an iteration decides, None before the first one."""
    return next((entry for entry in reversed(plans) if entry.adopted_at <= iteration), None)


def with_adoption(plan: Plan, iteration: int, why: str) -> Plan:
    """Return the plan with a note of the first iteration that uses it, and why."""
    notes = {ADOPTED_AT: iteration, ADOPTED_BECAUSE: why}
    search = type(plan.search).model_validate({**plan.search.model_dump(), **notes})
    return plan.model_copy(update={"search": search})
