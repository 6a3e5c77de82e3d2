"""What happened during a simulation, collected as it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Interval:
    """A GPU at work."""

    gpu: int
    """GPU index."""
    activity: str
    """RL task, or `weight_sync`."""
    start_s: float
    end_s: float
    iteration: int


@dataclass(slots=True)
class Recorder:
    """Intervals, lags and counts."""

    intervals: list[Interval] = field(default_factory=list)
    iteration_ends_s: list[float] = field(default_factory=list)
    """Simulated time at which the new policy of each iteration was in place."""
    lags: Counter[int] = field(default_factory=Counter)
    """Samples by lag (trained version minus generating version)."""
    tokens_by_iteration: list[int] = field(default_factory=list)
    """Response tokens of each iteration."""
    lost_work: int = 0
    """Replica or task runs that an outage ended."""
    producer_wait_s: float = 0.0
    """Seconds that generation waited for the staleness bound."""
    consumer_wait_s: float = 0.0
    """Seconds that training waited for rollouts."""

    def busy(self, gpus: Iterable[int], activity: str, start_s: float, end_s: float, iteration: int) -> None:
        """Record that GPUs were at work."""
        if end_s > start_s:
            self.intervals.extend(Interval(gpu, activity, start_s, end_s, iteration) for gpu in gpus)
