"""Who works when in one iteration, promised and measured, as spans and as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from plans.cost.report import CostReport
from plans.spec.job import Mode
from plans.workflow import RlTask, TaskKind
from plugins.pages.line_chart import ticks
from stages.stage_times import ORDER
from storage.runs import IterationRecord

WIDTH: Final = 860
_LEFT, _RIGHT, _LANE, _TOP, _BOTTOM = 170, 76, 22, 6, 22


@dataclass(frozen=True, slots=True)
class Span:
    """One bar."""

    name: str
    """Task or stage."""
    start_s: float
    """Start, seconds from the start of the iteration."""
    end_s: float
    """End."""
    kind: str
    """generation, inference, training, transfer or other: its colour."""


_KINDS: Final = {
    "generate": "generation",
    "infer": "inference",
    "reward_inference": "inference",
    "reference_inference": "inference",
    "critic_inference": "inference",
    "train": "training",
    "critic_training": "training",
    "weight_sync": "transfer",
}


def predicted_spans(report: CostReport, mode: Mode) -> list[Span]:
    """Return the spans that a priced plan promises.

    Phases follow each other (asynchronous: generation beside inference and training); the tasks of a phase start with
    it, whether or not they share GPUs, so a phase may be longer than the longest of its bars.
    """
    if report.phases is None:
        return []
    phases = report.phases
    after = 0.0 if mode is Mode.ASYNC else phases.generation_s
    starts = {
        TaskKind.GENERATION: (0.0, "generation"),
        TaskKind.INFERENCE: (after, "inference"),
        TaskKind.TRAINING: (after + phases.inference_s, "training"),
    }
    spans = []
    for task, cost in report.tasks.items():
        start, kind = starts[RlTask(task).kind]
        if cost is not None:
            spans.append(Span(RlTask(task).value, start, start + cost.total_s, kind))
    end = max(after + phases.inference_s + phases.training_s, phases.generation_s)
    if phases.transfer_s:
        spans.append(Span("weight transfer", end, end + phases.transfer_s, "transfer"))
    return sorted(spans, key=lambda span: span.start_s)


def measured_spans(record: IterationRecord) -> list[Span]:
    """Return the spans of an iteration from its record: seconds by stage and the gaps between them.

    Stages side by side are drawn from the first start among them.
    """
    gaps = record.metadata.get("gaps_s", {})
    spans: list[Span] = []
    before, end = None, 0.0
    for group in ORDER:
        present = [stage.value for stage in group if stage.value in record.measured_s]
        if not present:
            continue
        start = end + float(gaps.get(f"{before}->{present[0]}", 0.0)) if before else 0.0
        seconds = {name: record.measured_s[name] for name in present}
        spans += [Span(name, start, start + s, _KINDS.get(name, "other")) for name, s in seconds.items()]
        before, end = present[0], start + max(seconds.values())
    return spans


def gantt(title: str, spans: Sequence[Span], total_s: float) -> Markup:
    """Return the picture of some spans, one lane each.

    Args:
        title: What it shows, for people who can't see it.
        spans: The bars.
        total_s: Seconds that the width stands for; two pictures with one total can be compared.
    """
    if not spans or total_s <= 0:
        return Markup("")
    height = _TOP + _LANE * len(spans) + _BOTTOM
    scale = (WIDTH - _LEFT - _RIGHT) / total_s
    said = "; ".join(f"{span.name} {span.start_s:.3g} to {span.end_s:.3g} s" for span in spans)
    body = "".join([*_axis(total_s, scale, height), *(_bar(i, span, scale) for i, span in enumerate(spans))])
    return Markup(
        f'<svg class="gantt" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}: {escape(said)}">'
        f"{body}</svg>"
    )


def _axis(total_s: float, scale: float, height: int) -> Iterator[str]:
    for mark in (mark for mark in ticks(0.0, total_s, 8) if mark <= total_s * 1.0001):
        x = _LEFT + mark * scale
        yield f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{height - 7}" text-anchor="middle">{mark:.4g} s</text>'


def _bar(index: int, span: Span, scale: float) -> str:
    y, x = _TOP + index * _LANE, _LEFT + span.start_s * scale
    width = max(1.5, (span.end_s - span.start_s) * scale)
    seconds = f"{span.end_s - span.start_s:.3g} s"
    name = escape(span.name)
    return (
        f'<text class="lane" x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{name}</text>'
        f'<rect class="bar {span.kind}" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_LANE - 6}" rx="2">'
        f"<title>{name}: {seconds}, from {span.start_s:.3g} s</title></rect>"
        f'<text class="amount" x="{x + width + 4:.1f}" y="{y + 15}">{seconds}</text>'
    )
