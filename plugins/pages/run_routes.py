"""The page *Run*: how reward, losses, staleness and speed went over the iterations, and what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse

from plugins.pages.arriving import ArrivingPage
from plugins.pages.line_chart import Chart, Series, line_chart
from plugins.pages.render import Pages, link
from plugins.pages.run_source import PageRun
from stages.plan_history import ADOPTED_BECAUSE, committed_plans
from stages.stage_times import ORDER
from storage.alerts import list_alerts
from storage.runs import IterationRecord

#: Title, unit, and metrics with their names in the legend.
_CHARTS: Final = (
    ("Reward", "", (("reward_mean", "training"), ("eval_reward_mean", "held out"))),
    ("Response length", "tokens", (("response_tokens_mean", "mean"), ("response_tokens_p95", "95 %"))),
    ("KL to the reference", "nats", (("kl", "KL"),)),
    ("Entropy", "nats", (("entropy", "entropy"),)),
    ("Loss", "", (("loss", "policy"), ("value_loss", "critic"))),
    ("Staleness", "policy versions", (("lag_mean", "mean"), ("lag_max", "largest"), ("lag_limit", "limit"))),
    ("Throughput", "tokens/s", (("tokens_per_s", "sampling"),)),
    ("Overhead", "share of the iteration", (("overhead_fraction", "between stages"),)),
    (
        "Left out and cut",
        "share of rows",
        (("dropped_fraction", "left out"), ("truncated_fraction", "cut at the limit")),
    ),
)
_LIMITS: Final = frozenset({"lag_limit"})

_TABLE_ROWS: Final = 100
"""Iterations in the table, the newest ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to a run."""

    iteration: int
    """Iteration that it belongs to."""
    kind: str
    """alarm, alert, plan or rewind."""
    sentence: str
    """What happened."""
    at: datetime | None = None
    """When, UTC; None where it is not recorded."""


def routes(pages: Pages) -> APIRouter:
    """Return the routes of this page."""
    router = APIRouter()

    @router.get("/dags/{dag_id}/run", name="run")
    def run_page(request: Request, dag_id: str) -> ArrivingPage:
        named = pages.source.named(dag_id)

        def facts() -> dict[str, Any]:
            run = pages.source.find(named)
            records = pages.source.records(run)
            return {
                "run": run, "charts": metric_charts(records), "stages": stage_charts(records),
                "events": events_of(run, records), "rows": records[::-1][:_TABLE_ROWS], "num_records": len(records),
            }  # fmt: skip

        return pages.page(request, "run", facts, run=named, heading=f"Run {named.name}")

    @router.get("/dags/{dag_id}", name="start")
    def start(request: Request, dag_id: str) -> RedirectResponse:
        return RedirectResponse(link(request, "run", dag_id=dag_id))

    return router


def metric_charts(records: Sequence[IterationRecord]) -> list[Chart]:
    """Return the charts of metrics that at least one iteration has."""
    made = []
    for title, unit, lines in _CHARTS:
        series = [
            Series(
                name=name,
                points=[(record.iteration, record.metrics.get(metric)) for record in records],
                is_dashed=metric in _LIMITS,
            )
            for metric, name in lines
        ]
        made.append(line_chart(title, unit, series))
    return [chart for chart in made if chart.series]


def stage_charts(records: Sequence[IterationRecord]) -> list[Chart]:
    """Return a chart of measured against predicted seconds for every stage that was measured."""
    measured = {name for record in records for name in record.measured_s}
    ordered = [stage.value for group in ORDER for stage in group if stage.value in measured]
    names = dict.fromkeys([*ordered, *sorted(measured)])
    return [
        line_chart(
            name,
            "s",
            [
                Series(name="measured", points=[(r.iteration, r.measured_s.get(name)) for r in records]),
                Series(
                    name="predicted", points=[(r.iteration, r.predicted_s.get(name)) for r in records], is_dashed=True
                ),
            ],
        )
        for name in names
    ]


def events_of(run: PageRun, records: Sequence[IterationRecord]) -> list[Event]:
    """Return alarms, alerts about what no record tells, plans and rewinds, newest iteration first."""
    found = [
        Event(iteration=record.iteration, kind="alarm", sentence=alarm, at=record.ended_at)
        for record in records
        for alarm in record.alarms
    ]
    found += [
        Event(iteration=alert.iteration, kind="alert", sentence=alert.sentence, at=alert.raised_at)
        for alert in list_alerts(run.store, run.name)
        if not alert.is_alarm
    ]
    for entry in committed_plans(run.store, run.name):
        why = (entry.plan.search.model_extra or {}).get(ADOPTED_BECAUSE)
        sentence = f"plan {entry.number} ({entry.plan.method}) in force" + (f": {why}" if why else "")
        found.append(Event(iteration=entry.adopted_at, kind="plan", sentence=sentence))
    for rollback in () if run.head is None else run.head.rollbacks:
        sentence = f"rewound from version {rollback.from_version} to {rollback.to_version}: {rollback.reason}"
        found.append(Event(iteration=rollback.to_version, kind="rewind", sentence=sentence, at=rollback.at))
    return sorted(found, key=lambda event: -event.iteration)
