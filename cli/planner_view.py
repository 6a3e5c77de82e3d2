"""What a person sees of a search and of its plan: a progress line on standard error, tables on standard output."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from cli.output import Output
from cli.tables import table
from plans.explain import Explanation
from plans.search.run import Progress as SearchProgress
from plans.search.warm_up import COMPILING


class SearchView:
    """A live progress bar while a person watches; nothing otherwise."""

    def __init__(self, output: Output, method: str) -> None:
        """Prepare the bar of one search."""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            console=output.progress_console,
            transient=True,
            disable=not output.is_interactive,
        )
        self._method = method
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        self._task = self._bar.add_task(self._method, total=1.0, state="starting")
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._bar.stop()

    def update(self, state: SearchProgress) -> None:
        """Show the state of the search."""
        if state.phase == COMPILING:
            self._bar.console.print(state.phase, markup=False)
            return
        if self._task is None:
            return
        best = "no plan yet" if math.isinf(state.best_iteration_s) else f"best {state.best_iteration_s:.4g} s"
        used = f"{state.evaluations} evaluations, {state.elapsed_s:.0f} s, {state.phase}"
        text = f"{best}, {used} (Ctrl-C ends with the best)"
        self._bar.update(self._task, completed=min(1.0, state.fraction), state=text)


def explanation_view(explanation: Explanation) -> Group:
    """Return the tables and sentences of an explanation."""
    tasks = table(
        "Tasks (layers per stage, samples per replica)",
        ("task", "grp", "dp", "pp", "tp", "seconds", "machines", "layers", "samples"),
        (
            (row.task, row.group, row.dp, row.pp, row.tp, row.seconds, row.machines, row.layers, row.samples)
            for row in explanation.tasks
        ),
    )
    tasks.columns[0].no_wrap = True
    reasons = [Text(f"  {row.task}: {row.bottleneck}") for row in explanation.tasks]
    memory = table(
        "Memory of the fullest GPU of each machine (GB)",
        ("machine", "type", "gpus", "models", "working", "capacity", "used"),
        (
            (row.machine, row.gpu_type, row.num_gpus, row.model_gb, row.working_gb, row.capacity_gb,
             _share(row.least_share, row.most_share))
            for row in explanation.memory
        ),
    )  # fmt: skip
    sentences = [*explanation.limits, explanation.cost, explanation.idle, explanation.search]
    closing = [Text(sentence) for sentence in sentences if sentence]
    return Group(
        Text(explanation.headline, style="bold"), tasks, Text("Bottlenecks", style="bold"), *reasons, memory, *closing
    )


def _share(least: float, most: float) -> str:
    low, high = f"{least:.0%}", f"{most:.0%}"
    return high if low == high else f"{low} to {high}"
