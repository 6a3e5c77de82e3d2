"""Clock, phase timer and deadline of a stage process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stages.errors import DeadlineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Wall clock for records, monotonic clock for durations; replaced in tests."""

    now: Callable[[], float] = time.time
    """Unix time, seconds."""
    monotonic: Callable[[], float] = time.monotonic
    """Seconds since any fixed moment."""


@dataclass(kw_only=True, slots=True)
class PhaseTimer:
    """Seconds by named phase; a name entered twice adds up."""

    clock: Clock = field(default_factory=Clock)
    """Where time comes from."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in the order of first entry."""
    current: str | None = None
    """Phase that is running, for messages."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body, also when it raises. Worker threads are part of the phase that the main thread is in."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer, start = self.current, self.clock.monotonic()
        self.current = name
        self.phases_s.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.phases_s[name] += self.clock.monotonic() - start
        self.current = outer  # kept on an exception: the message names the phase that was running


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """The moment at which a stage gives up."""

    clock: Clock
    """Where time comes from."""
    ends_at: float
    """Moment by `clock.monotonic`, seconds."""

    def remaining_s(self, waiting_for: str) -> float:
        """Return the seconds left.

        Raises:
            DeadlineError: none are left; the message names `waiting_for`.
        """
        left = self.ends_at - self.clock.monotonic()
        if left <= 0:
            raise DeadlineError(
                f"the stage's deadline passed {-left:.0f} s ago while it waited for {waiting_for}; it will be tried "
                "again, or raise limits.stage_deadline_s",
                waiting_for=waiting_for,
            )
        return left
