"""How a followed run is shown: a live panel for a person, one line per event otherwise."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.follow import Progress, RunFollower
from cli.output import Output

POLL_INTERVAL_S = 1.0
"""Seconds between two looks."""


class FollowView:
    """Shows the progress of a run on standard error."""

    def __init__(self, output: Output, iterations: int) -> None:
        """Choose the form by whether a terminal is there."""
        self._output = output
        self._iterations = iterations
        self._started_at = time.monotonic()
        self._live = Live(console=output.progress_console, refresh_per_second=4) if output.is_interactive else None

    def __enter__(self) -> Self:
        """Start the live display, if there is one."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the live display."""
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Show what a look saw."""
        if self._live is None:
            for event in progress.events:
                self._output.progress(event)
            return
        for event in progress.events:
            if " done (" in event or "FAILED" in event or "again" in event:
                self._live.console.print(event, markup=False)
        self._live.update(self._panel(progress))

    def _panel(self, progress: Progress) -> Group:
        last = progress.records[-1].metrics if progress.records else {}
        facts = Table.grid(padding=(0, 2))
        iteration = "-" if progress.iteration is None else f"{progress.iteration} of {self._iterations}"
        reward = last.get("reward_mean")
        speed = last.get("tokens_per_s")
        facts.add_row("iteration", iteration, "stage", ", ".join(progress.stages) or "scheduling")
        facts.add_row(
            "reward",
            "-" if reward is None else f"{reward:.3f}",
            "tokens/s",
            "-" if speed is None else f"{speed:.0f}",
        )
        elapsed = time.monotonic() - self._started_at
        facts.add_row("elapsed", _clock(elapsed), "left", "-" if progress.eta_s is None else _clock(progress.eta_s))
        bar = ProgressBar(total=self._iterations, completed=progress.num_done, width=60)
        return Group(Text(""), bar, facts)


def follow(follower: RunFollower, output: Output, *, until_iteration: int | None = None) -> None:
    """Show a run until it is finished, or until the DAG run of one iteration has ended.

    Raises:
        RunFailedError: an iteration failed and nothing goes on.
        DeploymentError: Airflow stopped answering.
    """
    with FollowView(output, follower.entry.iterations) as view:
        while True:
            progress = follower.poll()
            if progress is not None:
                view.show(progress)
                if progress.is_finished:
                    return
                if until_iteration is not None and follower.final_state(until_iteration) is not None:
                    return
            time.sleep(POLL_INTERVAL_S)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
