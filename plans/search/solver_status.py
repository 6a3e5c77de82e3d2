"""What a solver's raw outcome means: what is known of the answer, and why the solver stopped. Two things.

Knows no solver library: outcomes come in as the solver's own words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class SolveStatus(StrEnum):
    """What is known of the answer."""

    OPTIMAL = "optimal"
    """A solution, proved optimal within the tolerance."""
    FEASIBLE = "feasible"
    """A solution with a gap to the proved bound."""
    INFEASIBLE = "infeasible"
    """Proof that there is no solution."""
    NO_SOLUTION = "no_solution"
    """Neither a solution nor a proof."""

    @property
    def has_solution(self) -> bool:
        """Whether there is a solution."""
        return self in SOLUTION_STATUSES


SOLUTION_STATUSES = frozenset({SolveStatus.OPTIMAL, SolveStatus.FEASIBLE})


class Termination(StrEnum):
    """Why a solver or a search stopped."""

    COMPLETE = "complete"
    """It came to its end."""
    LIMIT = "budget"
    """Its limit of time or evaluations was reached."""
    STOPPED = "stopped"
    """The caller asked it to stop."""
    SIZE = "too large"
    """The problem is too large for the method."""
    ERROR = "solver error"
    """The solver failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Status and termination."""

    status: SolveStatus
    """What is known."""
    termination: Termination
    """Why it stopped."""


_HIGHS_LIMITS = frozenset({"kTimeLimit", "kIterationLimit", "kSolutionLimit", "kObjectiveBound", "kObjectiveTarget"})


#: The second one comes from presolve; the objectives here are bounded, so it means the same.
_HIGHS_INFEASIBLE = frozenset({"kInfeasible", "kUnboundedOrInfeasible"})


def highs_verdict(model_status: str, *, has_solution: bool) -> Verdict:
    """Return the meaning of a HiGHS model status (such as `kOptimal`) for a model with a bounded objective.

    Args:
        model_status: name of the status.
        has_solution: whether HiGHS holds a feasible point.

    PuLP reports a time-out of HiGHS as optimal even without a solution, so its own status is not used.
    """
    if model_status == "kOptimal":
        return Verdict(SolveStatus.OPTIMAL, Termination.COMPLETE)
    if model_status in _HIGHS_INFEASIBLE:
        return Verdict(SolveStatus.INFEASIBLE, Termination.COMPLETE)
    known = SolveStatus.FEASIBLE if has_solution else SolveStatus.NO_SOLUTION
    if model_status in _HIGHS_LIMITS:
        return Verdict(known, Termination.LIMIT)
    if model_status == "kInterrupt":
        return Verdict(known, Termination.STOPPED)
    return Verdict(known, Termination.ERROR)


def pulp_verdict(status: str, solution_status: str) -> Verdict:
    """Return the meaning of PuLP's pair of words for CBC (`LpStatus[...]`, `LpSolution[...]`)."""
    if solution_status == "Optimal Solution Found":
        return Verdict(SolveStatus.OPTIMAL, Termination.COMPLETE)
    if "Infeasible" in (status, solution_status):
        return Verdict(SolveStatus.INFEASIBLE, Termination.COMPLETE)
    if solution_status == "Solution Found":
        return Verdict(SolveStatus.FEASIBLE, Termination.LIMIT)
    if status == "Not Solved":
        return Verdict(SolveStatus.NO_SOLUTION, Termination.LIMIT)
    return Verdict(SolveStatus.NO_SOLUTION, Termination.ERROR)


def relative_gap(best_s: float, bound_s: float) -> float:
    """Return (best - bound) / best in [0, 1]; 1 without a solution."""
    if not math.isfinite(best_s):
        return 1.0
    return max(0.0, (best_s - bound_s) / best_s) if best_s > 0 else 0.0


def search_status(best_s: float, bound_s: float, *, tolerance: float) -> SolveStatus:
    """Return what a search knows that holds a plan of `best_s` and a proved lower bound.

    An infinite bound is a proof that no plan exists.
    """
    if not math.isfinite(best_s):
        return SolveStatus.INFEASIBLE if bound_s == math.inf else SolveStatus.NO_SOLUTION
    return SolveStatus.OPTIMAL if relative_gap(best_s, bound_s) <= tolerance else SolveStatus.FEASIBLE
