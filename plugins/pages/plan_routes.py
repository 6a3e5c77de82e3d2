"""The page *Plan*: which machine does what, how full it is, what was promised and measured, and why plans changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plans.cost.report import CostReport
from plans.explain import Explanation, explain
from plans.plan import Plan, plan_faults
from plugins.pages.arriving import ArrivingPage
from plugins.pages.cluster_map import cluster_map, link_rows, memory_bars, roles_of
from plugins.pages.faults import PageError
from plugins.pages.gantt import Span, gantt, measured_spans, predicted_spans
from plugins.pages.render import Pages, link
from plugins.pages.run_source import PageRun
from stages.plan_history import ADOPTED_BECAUSE, NumberedPlan, committed_plans, plan_of_iteration
from storage.runs import IterationRecord, decided_plan


class PlanQuery(BaseModel):
    """The query of an address about a plan."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    plan: int | None = Field(default=None, ge=0, le=10**9)
    """Plan number; absent is that of the iteration, or the newest one."""
    iteration: int | None = Field(default=None, ge=0, le=10**9)
    """Iteration whose times are shown; absent is the newest one that the plan made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryRow:
    """A plan of the run in one line."""

    number: int
    """Plan number."""
    adopted_at: int
    """First iteration that uses it."""
    method: str
    """How it was found."""
    iteration_s: float | None
    """Seconds per iteration that it promises."""
    measured_s: float | None
    """Mean seconds of the iterations that it made."""
    why: str
    """Why it came into force."""


def routes(pages: Pages) -> APIRouter:
    """Return the routes of this page."""
    router = APIRouter()

    @router.get("/dags/{dag_id}/plan", name="plan")
    def plan_page(request: Request, dag_id: str) -> ArrivingPage:
        named, query = pages.source.named(dag_id), _read(request)

        def facts() -> dict[str, Any]:
            return _facts(pages, pages.source.find(named), query)

        return pages.page(request, "plan", facts, run=named, heading="Plan")

    @router.get("/dags/{dag_id}/dag_runs/{dag_run_id}/plan", name="dag_run_plan")
    def of_dag_run(request: Request, dag_id: str, dag_run_id: str) -> RedirectResponse:
        run = pages.source.named(dag_id)
        iteration = pages.access.iteration_of(run.dag_id, dag_run_id)
        return RedirectResponse(link(request, "plan", {"iteration": iteration}, dag_id=dag_id))

    return router


def _facts(pages: Pages, run: PageRun, query: PlanQuery) -> dict[str, Any]:
    plans = committed_plans(run.store, run.name)
    entry = chosen_plan(run, plans, query)
    records = pages.source.records(run)
    made = [record for record in records if record.plan == entry.number]
    record = _record(run, made, query.iteration)
    report = report_of(entry.plan)
    return {
        "entry": entry, "record": record, "report": report, "explanation": _explanation(run, entry.plan, report),
        "history": history(plans, records), "links": link_rows(run.cluster),
        "map": cluster_map(run.cluster, roles_of(entry.plan)), "groups": entry.plan.groups,
        "memory": memory_bars(report.memory) if report and report.memory else Markup(""),
        **_pictures(run, report, record),
    }  # fmt: skip


def _read(request: Request) -> PlanQuery:
    given = {name: value for name, value in request.query_params.items() if value != ""}
    try:
        return PlanQuery.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(f"{f['loc'][0]} is {str(f['input'])[:60]!r}: {f['msg']}" for f in error.errors())
        raise PageError(f"The address can't be used: {faults}.", HTTPStatus.BAD_REQUEST) from error


def chosen_plan(run: PageRun, plans: Sequence[NumberedPlan], query: PlanQuery) -> NumberedPlan:
    """Return the plan that is asked for: by number, that of an iteration, or the newest one.

    Raises:
        PageError: there is none (yet).
    """
    if not plans:
        raise PageError(f"Run {run.name} has no plan yet: its first iteration decides it; look again later.")
    number = query.plan
    if number is None and query.iteration is not None:
        number = decided_plan(run.store, run.name, query.iteration)
        if number is None:
            standing = plan_of_iteration(list(plans), query.iteration)
            number = plans[-1].number if standing is None else standing.number
    entry = plans[-1] if number is None else next((p for p in plans if p.number == number), None)
    if entry is None:
        raise PageError(f"Run {run.name} has no plan {number}: its plans are 0 to {len(plans) - 1}.")
    return entry


def report_of(plan: Plan) -> CostReport | None:
    """Return the price that a plan carries; None for one without, e.g. written by hand."""
    if not plan.predicted:
        return None
    try:
        return CostReport.model_validate(plan.predicted)
    except ValidationError:
        return None  # of another version


def history(plans: Sequence[NumberedPlan], records: Sequence[IterationRecord]) -> list[HistoryRow]:
    """Return the plans of a run, newest first."""
    rows = []
    for entry in plans:
        report = report_of(entry.plan)
        seconds = [s for record in records if record.plan == entry.number and (s := seconds_of(record)) is not None]
        rows.append(
            HistoryRow(
                number=entry.number,
                adopted_at=entry.adopted_at,
                method=entry.plan.method,
                iteration_s=None if report is None else report.iteration_s,
                measured_s=sum(seconds) / len(seconds) if seconds else None,
                why=str((entry.plan.search.model_extra or {}).get(ADOPTED_BECAUSE) or ""),
            )
        )
    return rows[::-1]


def seconds_of(record: IterationRecord) -> float | None:
    """Return the seconds of an iteration; None where start or end is not known."""
    if record.started_at is None or record.ended_at is None:
        return None
    return (record.ended_at - record.started_at).total_seconds()


def _record(run: PageRun, made: Sequence[IterationRecord], iteration: int | None) -> IterationRecord | None:
    """Return the record whose times are shown; None where the plan has made none yet."""
    if iteration is not None:
        last = run.entry.iterations - 1
        if not run.entry.first_iteration <= iteration <= last:
            raise PageError(
                f"Iteration {iteration} of run {run.name} does not exist: the run has iterations "
                f"{run.entry.first_iteration} to {last}."
            )
        return next((record for record in made if record.iteration == iteration), None)
    return made[-1] if made else None


def _explanation(run: PageRun, plan: Plan, report: CostReport | None) -> Explanation | None:
    """Return the plan in words; None for one of another cluster or job than the run's present ones."""
    if report is None or plan_faults(plan, run.cluster, run.job):
        return None
    return explain(run.cluster, run.job, plan, report)


def _pictures(run: PageRun, report: CostReport | None, record: IterationRecord | None) -> dict[str, Any]:
    predicted: list[Span] = [] if report is None else predicted_spans(report, run.job.mode)
    measured = [] if record is None else measured_spans(record)
    total = max((span.end_s for span in [*predicted, *measured]), default=0.0)
    return {
        "predicted": gantt("Promised times", predicted, total),
        "measured": gantt("Measured times", measured, total),
    }
