"""How much a search may do: a number of evaluations, or seconds on a clock that the caller passes in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from plans.errors import BudgetTooSmallError, SearchError

Clock = Callable[[], float]
"""Seconds on a monotonic clock."""
StopCheck = Callable[[], bool]
"""Whether the caller wants the search to end now."""

_BUDGET = re.compile(r"^(?P<value>[0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(?P<unit>s|min|h|evals)$")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit on evaluations or on seconds; exactly one of the two is set."""

    evaluations: int | None = None
    """Plans (or changes of a plan) that may be priced."""
    seconds: float | None = None
    """Wall-clock seconds."""

    def __post_init__(self) -> None:
        """Refuse a budget with both limits, with none, or with one that is not a positive finite number."""
        if (self.evaluations is None) == (self.seconds is None):
            raise SearchError("A budget has exactly one limit: evaluations or seconds; give one of them.")
        limit = self.evaluations if self.evaluations is not None else self.seconds
        if limit is None or not math.isfinite(limit) or limit <= 0:
            raise BudgetTooSmallError(f"The budget is {limit}, but it is a positive, finite number; correct it.")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Return the budget of a text such as `30s`, `2min` or `5000evals`; raises SearchError for another form."""
        match = _BUDGET.match(text.strip().lower())
        if match is None:
            raise SearchError(
                f"Budget {text!r} is unreadable; write seconds (30s, 2min, 1h) or evaluations (5000evals)."
            )
        value, unit = float(match["value"]), match["unit"]
        if unit == "evals":
            if value != int(value):
                raise SearchError(f"Budget {text!r} is not a whole number of evaluations; write one such as 5000evals.")
            return cls(evaluations=int(value))
        return cls(seconds=value * _SECONDS[unit])


class Meter:
    """What a search has used of its budget.

    Args:
        budget: the limit.
        clock: seconds; needed for a budget in seconds, otherwise only the trace reads it.
        should_stop: asked between evaluations.
    """

    def __init__(self, budget: Budget, clock: Clock | None = None, should_stop: StopCheck | None = None) -> None:
        """Start counting now."""
        if budget.seconds is not None and clock is None:
            raise SearchError("A budget in seconds needs a clock; pass clock=time.monotonic, or count evaluations.")
        self.budget = budget
        self.clock = clock
        self.evaluations = 0
        self._should_stop = should_stop
        self._stopped = False
        self._start = clock() if clock is not None else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start; 0 without a clock."""
        return self.clock() - self._start if self.clock is not None else 0.0

    @property
    def is_counted(self) -> bool:
        """Whether the limit is a number of evaluations."""
        return self.budget.evaluations is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the caller has asked to stop."""
        if not self._stopped and self._should_stop is not None:
            self._stopped = bool(self._should_stop())
        return self._stopped

    @property
    def remaining_evaluations(self) -> int | None:
        """Evaluations left; None for a budget in seconds."""
        limit = self.budget.evaluations
        return None if limit is None else max(0, limit - self.evaluations)

    @property
    def remaining_fraction(self) -> float:
        """Share of the budget that is left, in [0, 1]."""
        if self.budget.evaluations is not None:
            return max(0.0, 1.0 - self.evaluations / self.budget.evaluations)
        if self.budget.seconds is not None:
            return max(0.0, 1.0 - self.elapsed_s / self.budget.seconds)
        return 0.0

    @property
    def is_spent(self) -> bool:
        """Whether the search has to end: limit reached or stop wanted."""
        return self.is_stopped or self.remaining_fraction <= 0.0

    def spend(self, evaluations: int = 1) -> None:
        """Count evaluations that were done."""
        self.evaluations += evaluations

    def spend_at_most(self, evaluations: int) -> None:
        """Count evaluations that were done in a block whose size was not known before; the limit is not passed."""
        left = self.remaining_evaluations
        self.evaluations += evaluations if left is None else min(evaluations, left)

    @property
    def termination(self) -> str:
        """Why the search ended, in words for `search.termination`."""
        if self._stopped:
            return "stopped"
        return "budget" if self.remaining_fraction <= 0.0 else "complete"
