"""Plan text -> plan, through the one loader's machinery (`plans.spec.load.build`)."""

from __future__ import annotations

from collections.abc import Mapping

from plans.plan import Plan
from plans.spec.load import build, load_text


def load_plan(text: str, source_name: str) -> Plan:
    """Return the plan of a JSON or YAML text; raises SpecError with every fault of its form.

    Whether the plan belongs to a cluster and a job is `plans.plan.check_plan`'s question.
    """
    return load_text(text, source_name, plan_from_document)


def plan_from_document(document: Mapping[str, object], source_name: str) -> Plan:
    """Return the plan of a parsed document; raises SpecError with every fault of its form."""
    return build(Plan, document, source_name, lambda _plan: [])
