"""Tables, numbers and curves as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table; numbers are right-aligned and shortened."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    content = [list(row) for row in rows]
    for index, column in enumerate(columns):
        is_number = all(isinstance(row[index], int | float | None) for row in content)
        justify: JustifyMethod = "right" if is_number and content else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=is_number)
    for row in content:
        made.add_row(*(cell(value) for value in row))
    return made


def cell(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a value as text: nothing for None, four significant digits for fractions."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def curve(title: str, xs: Sequence[float], ys: Sequence[float], *, width: int = 72, height: int = 14) -> str:
    """Return a line plot for the terminal; an empty string without points."""
    if not ys:
        return ""
    import plotext  # type: ignore[import-untyped]  # the library ships no types

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.title(title)
    signal = figure.signal(list(xs), list(ys), marker="braille")
    signal.lines()
    figure.draw(signal)
    return str(plotext.uncolorize(figure.build().string()))
