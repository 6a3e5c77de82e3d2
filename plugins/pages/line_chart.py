"""A line chart as inline SVG: numbers in, markup out; colours, light and dark, are the style sheet's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

WIDTH: Final = 420
HEIGHT: Final = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24

Points = Sequence[tuple[int, float | None]]
"""Values by iteration; None is a gap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line."""

    name: str
    """Name in the legend."""
    points: Points
    """Values by iteration, ascending."""
    is_dashed: bool = False
    """Whether it is a prediction or a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart with what a template writes around it."""

    title: str
    """What is drawn."""
    unit: str
    """Unit of the vertical axis; empty for plain numbers."""
    series: tuple[Series, ...]
    """The lines that have at least one value."""
    svg: Markup
    """The picture; empty when no line has a value."""

    @property
    def last(self) -> list[tuple[str, float]]:
        """Last value of each line."""
        return [(s.name, [v for _, v in s.points if v is not None][-1]) for s in self.series]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From iterations and values to places in the picture."""

    first: float
    last: float
    low: float
    high: float

    def x(self, iteration: float) -> float:
        span = max(1e-12, self.last - self.first)
        return _LEFT + (iteration - self.first) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(title: str, unit: str, series: Sequence[Series]) -> Chart:
    """Return the chart of some lines; lines without a value are left out."""
    shown = tuple(s for s in series if any(_is_drawn(value) for _, value in s.points))
    return Chart(title=title, unit=unit, series=shown, svg=_svg(title, unit, shown) if shown else Markup(""))


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers that cover [low, high], about as many as wanted, ascending."""
    span = max(high - low, 1e-9 * max(abs(low), abs(high)), 1e-300)
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    return [index * step for index in range(first, last + 1)]


def _is_drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _svg(title: str, unit: str, series: Sequence[Series]) -> Markup:
    values = [v for s in series for _, v in s.points if v is not None and math.isfinite(v)]
    iterations = [k for s in series for k, _ in s.points]
    low, high = min(values), max(values)
    margin = 0.0 if high > low else abs(high) / 10 or 1.0  # a constant runs through the middle
    marks = ticks(low - margin, high + margin)
    scale = _Scale(min(iterations), max(max(iterations), min(iterations) + 1), marks[0], marks[-1])
    label = f"{title}, {unit}" if unit else title
    said = "; ".join(f"{s.name} last {[v for _, v in s.points if _is_drawn(v)][-1]:.4g}" for s in series)
    body = "".join([*_axes(scale, marks), *(_line(index, s, scale) for index, s in enumerate(series))])
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}: {escape(said)}" '
        f'data-points="{escape(_hover(series, scale))}">{body}'
        f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/></svg>'
    )


def _axes(scale: _Scale, marks: Sequence[float]) -> Iterator[str]:
    for mark in marks:
        y = scale.y(mark)
        yield f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{mark:.4g}</text>'
    whole = [mark for mark in ticks(scale.first, scale.last, 6) if mark == int(mark)]
    for mark in (mark for mark in whole if scale.first <= mark <= scale.last):
        yield (f'<text class="tick" x="{scale.x(mark):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{int(mark)}</text>')


def _line(index: int, series: Series, scale: _Scale) -> str:
    """Return a line; a missing value ends a piece, a piece of one point is a dot."""
    pieces: list[list[str]] = [[]]
    for iteration, value in series.points:
        if value is None or not math.isfinite(value):
            pieces.append([])
        else:
            pieces[-1].append(f"{scale.x(iteration):.1f},{scale.y(value):.1f}")
    kind = f"line s{index % 6}{' dashed' if series.is_dashed else ''}"
    drawn = []
    for piece in pieces:
        if len(piece) == 1:
            x, _, y = piece[0].partition(",")
            drawn.append(f'<circle class="dot s{index % 6}" cx="{x}" cy="{y}" r="2.5"/>')
        elif piece:
            drawn.append(f'<polyline class="{kind}" points="{" ".join(piece)}"/>')
    return "".join(drawn)


def _hover(series: Sequence[Series], scale: _Scale) -> str:
    """Return what the script needs to say the values under the pointer."""
    document = {
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "first": scale.first,
        "last": scale.last,
        "series": [
            {"name": s.name, "values": {k: float(f"{v:.5g}") for k, v in s.points if v is not None and _is_drawn(v)}}
            for s in series
        ],
    }
    return json.dumps(document, separators=(",", ":"))
