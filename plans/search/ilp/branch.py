"""One grouping of the branch and bound: its proved bound, what was refuted in it, and what was too large to refute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from plans.search.groupings import Grouping
from plans.search.ilp.classes import Column
from plans.workflow import RlTask


@dataclass(slots=True)
class Stuck:
    """A choice of classes that an enumeration could not finish."""

    chosen: Mapping[RlTask, Column]
    """The choice."""
    bound_s: float
    """Proved lower bound of its plans."""
    limit: int
    """Steps to allow next time."""


@dataclass(slots=True)
class Branch:
    """State of one grouping."""

    grouping: Grouping
    """The grouping."""
    program_s: float
    """Lower bound of every plan that is neither refuted nor in a stuck choice; infinite = there is none."""
    is_relaxed: bool = True
    """Whether only its linear relaxation has been solved yet, at most."""
    refuted: list[Mapping[RlTask, Column]] = field(default_factory=list)
    """Choices without a better plan, and stuck ones: the program does not offer them again."""
    stuck: list[Stuck] = field(default_factory=list)
    """Choices that still have to be refuted."""

    @property
    def bound_s(self) -> float:
        """Lower bound of every plan of the grouping that is not refuted."""
        return min([self.program_s, *(entry.bound_s for entry in self.stuck)], default=math.inf)

    def next_stuck(self) -> Stuck | None:
        """Return and remove the stuck choice that holds the bound down; None where the program does."""
        if not self.stuck:
            return None
        entry = min(self.stuck, key=lambda stuck: stuck.bound_s)
        if entry.bound_s > self.program_s:
            return None
        self.stuck.remove(entry)
        return entry
