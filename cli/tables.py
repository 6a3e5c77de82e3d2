"""Tables, numbers and curves as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table; numbers are right-aligned and shortened."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    content = [list(row) for row in rows]
    for index, column in enumerate(columns):
        is_number = all(isinstance(row[index], int | float | None) for row in content)
        made.add_column(column, justify="right" if is_number and content else "left", overflow="fold")
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
    import plotext as plt  # type: ignore[import-untyped]  # the library ships no types

    plt.clear_figure()
    plt.theme("clear")
    plt.plot_size(width, height)
    plt.title(title)
    plt.plot(list(xs), list(ys), marker="braille")
    plt.xticks(sorted({int(x) for x in xs})[:: max(1, len(xs) // 8)])
    return str(plt.build())
