"""What a search method is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from plans.plan import Plan
from plans.search.problem import Problem
from plans.search.run import SearchRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a method hands back; pricing and checking are `make_plan`'s."""

    plan: Plan | None
    """The placement; None when nothing feasible was found."""
    trace: tuple[tuple[float, int, float], ...] = ()
    """Improvements as (seconds, evaluations, iteration seconds)."""
    optimal: bool | None = None
    """Whether the plan is proved optimal; None = no statement."""
    bound_s: float | None = None
    """Proved lower bound of `iteration_s`; None = none."""
    status: str | None = None
    """What is known of the answer (methods with a proof)."""
    termination: str | None = None
    """Why the search ended."""
    infeasible: str | None = None
    """Proof, in a sentence, that no plan exists; None = no such proof."""
    facts: Mapping[str, JsonValue] = field(default_factory=dict)
    """What else the search record says of the plan, by name."""


class Planner(Protocol):
    """A search method."""

    @property
    def name(self) -> str:
        """Name on the command line and in plan documents."""
        ...

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Search within the run's budget.

        Args:
            problem: cluster, job and model, with the tools derived from them.
            run: budget meter, seed, workers, progress callback and warm start.

        Returns:
            The best placement found. A method never returns an infeasible one.
        """
        ...
