"""What a planner gets beside the problem, and the record of what it found: incumbent, trace, progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from plans.plan import Plan
from plans.search.budget import Meter

CandidateT = TypeVar("CandidateT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a search, for display."""

    phase: str
    """What the search is doing."""
    elapsed_s: float
    """Seconds since the start."""
    evaluations: int
    """Evaluations so far."""
    best_iteration_s: float
    """Cost of the incumbent; infinite before there is one."""
    fraction: float
    """Share of the budget used, in [0, 1]."""


ProgressCallback = Callable[[Progress], None]


@dataclass(slots=True, kw_only=True)
class SearchRun:
    """Budget, seed and options of one search."""

    meter: Meter
    """The budget and what is used of it."""
    seed: int
    """Seed of every random stream."""
    workers: int = 1
    """Processes to use; the result does not depend on it when the budget counts evaluations."""
    on_progress: ProgressCallback | None = None
    """Called at each improvement and between steps."""
    warm_start: Plan | None = None
    """A plan to start from, already checked against cluster and job."""


@dataclass(slots=True)
class Incumbent(Generic[CandidateT]):
    """The best candidate so far and the trace of improvements."""

    run: SearchRun
    """The search that it belongs to."""
    best_s: float = math.inf
    """Cost of the best candidate."""
    best: CandidateT | None = None
    """The candidate; None before a feasible one was found."""
    trace: list[tuple[float, int, float]] = field(default_factory=list)
    """Improvements as (seconds, evaluations, cost)."""
    phase: str = "search"
    """Shown with the progress."""

    def offer(self, cost_s: float, candidate: CandidateT) -> bool:
        """Keep a candidate that is cheaper than the best; tell whether it was."""
        if not cost_s < self.best_s:
            return False
        self.best_s, self.best = cost_s, candidate
        meter = self.run.meter
        self.trace.append((meter.elapsed_s, meter.evaluations, cost_s))
        self.report()
        return True

    def offer_or_prefer(self, cost_s: float, candidate: CandidateT) -> bool:
        """Keep a candidate that is cheaper than the best, or as cheap and better in another way, such as smaller."""
        if cost_s == self.best_s and self.best is not None:
            self.best = candidate
            return True
        return self.offer(cost_s, candidate)

    def report(self) -> None:
        """Send the state to the caller."""
        if self.run.on_progress is None:
            return
        meter = self.run.meter
        self.run.on_progress(
            Progress(
                phase=self.phase,
                elapsed_s=meter.elapsed_s,
                evaluations=meter.evaluations,
                best_iteration_s=self.best_s,
                fraction=1.0 - meter.remaining_fraction,
            )
        )
