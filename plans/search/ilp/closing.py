"""Closing a choice of classes: every plan in it is enumerated against the best one known, or a limit is hit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plans.search.brute_force import JointSearch
from plans.search.brute_force_walk import Best, LimitReachedError
from plans.search.budget import Meter
from plans.search.groupings import Grouping
from plans.search.ilp.classes import Column
from plans.workflow import RlTask, TaskKind

#: Steps of an enumeration between looks at the clock.
LOOK_EVERY = 64
#: Steps for refuting a part of a choice, and for the whole choice at first.
PART_STEPS, FIRST_STEPS = 4_000, 20_000
#: Choices for which a kind of part is not tried again after it failed.
PAUSE = 8


@dataclass(slots=True)
class StepCounter:
    """A limit on the steps of one enumeration, and on the budget of the search."""

    meter: Meter
    """Budget of the search."""
    limit: int
    """Steps allowed."""
    steps: int = 0
    """Steps so far."""

    def __call__(self, is_priced: bool) -> None:
        """Count a step; raise at a limit."""
        self.steps += 1
        if is_priced:
            if self.meter.is_spent:
                raise LimitReachedError
            self.meter.spend()
        if self.steps > self.limit or (self.steps % LOOK_EVERY == 0 and self.meter.is_spent):
            raise LimitReachedError


@dataclass(slots=True)
class Closer:
    """Refutes choices of classes, and improves the best plan on the way."""

    search: JointSearch
    """The enumeration."""
    meter: Meter
    """Budget."""
    best: Best
    """Best plan; improved in place."""
    tolerance: float
    """Relative improvement that is not looked for."""
    part_steps: int = PART_STEPS
    """Steps for a part of a choice."""
    _pause: dict[str, int] = field(default_factory=dict)

    def refute(
        self, grouping: Grouping, chosen: Mapping[RlTask, Column], least_s: Mapping[RlTask, float], limit: int
    ) -> Mapping[RlTask, Column] | None:
        """Return the part of a choice that holds no plan better than the best; None where the limit was hit.

        The fewer classes a refutation names, the more plans it rules out: none (the whole grouping) is tried first,
        then training alone, generation alone, both, and then the choice as it is. A kind of part that failed is left
        out for a while.

        Args:
            grouping: the grouping.
            chosen: a class per task.
            least_s: least seconds of each task over all its classes.
            limit: steps for the whole choice.
        """
        training = {task: column for task, column in chosen.items() if task.kind is TaskKind.TRAINING}
        generation = {task: column for task, column in chosen.items() if task.kind is TaskKind.GENERATION}
        nothing: dict[RlTask, Column] = {}
        parts = (
            ("grouping", nothing),
            ("training", training),
            ("generation", generation),
            ("pair", training | generation),
        )
        for name, part in parts:
            if self._pause.get(name, 0) > 0:
                self._pause[name] -= 1
            elif self._closes(grouping, part, least_s, self.part_steps):
                return part
            else:
                self._pause[name] = PAUSE
        return chosen if self._closes(grouping, chosen, least_s, limit) else None

    def _closes(
        self, grouping: Grouping, part: Mapping[RlTask, Column], least_s: Mapping[RlTask, float], limit: int
    ) -> bool:
        if self.meter.is_spent:
            return False
        try:
            self.search.run(
                grouping,
                self.best,
                classes={task: column.cls for task, column in part.items()},
                lower_s={**least_s, **{task: column.seconds for task, column in part.items()}},
                tick=StepCounter(self.meter, limit),
                tolerance=self.tolerance,
            )
        except LimitReachedError:
            return False
        return True
