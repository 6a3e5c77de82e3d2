"""Raw solver outcomes and what they mean."""

from __future__ import annotations

import math

import pytest

from plans.search.solver_status import (
    SolveStatus,
    Termination,
    Verdict,
    highs_verdict,
    pulp_verdict,
    relative_gap,
    search_status,
)


@pytest.mark.parametrize(
    ("name", "has_solution", "expected"),
    [
        ("kOptimal", True, Verdict(SolveStatus.OPTIMAL, Termination.COMPLETE)),
        ("kInfeasible", False, Verdict(SolveStatus.INFEASIBLE, Termination.COMPLETE)),
        ("kTimeLimit", True, Verdict(SolveStatus.FEASIBLE, Termination.LIMIT)),
        ("kTimeLimit", False, Verdict(SolveStatus.NO_SOLUTION, Termination.LIMIT)),
        ("kInterrupt", False, Verdict(SolveStatus.NO_SOLUTION, Termination.STOPPED)),
        ("kSolveError", False, Verdict(SolveStatus.NO_SOLUTION, Termination.ERROR)),
        ("kUnboundedOrInfeasible", False, Verdict(SolveStatus.INFEASIBLE, Termination.COMPLETE)),
    ],
)
def test_highs_verdict_keeps_status_and_termination_apart(name: str, has_solution: bool, expected: Verdict) -> None:
    assert highs_verdict(name, has_solution=has_solution) == expected


@pytest.mark.parametrize(
    ("status", "solution", "expected"),
    [
        ("Optimal", "Optimal Solution Found", Verdict(SolveStatus.OPTIMAL, Termination.COMPLETE)),
        ("Optimal", "Solution Found", Verdict(SolveStatus.FEASIBLE, Termination.LIMIT)),
        ("Infeasible", "No Solution Exists", Verdict(SolveStatus.INFEASIBLE, Termination.COMPLETE)),
        ("Not Solved", "No Solution Found", Verdict(SolveStatus.NO_SOLUTION, Termination.LIMIT)),
        ("Undefined", "No Solution Found", Verdict(SolveStatus.NO_SOLUTION, Termination.ERROR)),
    ],
)
def test_pulp_verdict_does_not_take_a_time_out_for_a_proof(status: str, solution: str, expected: Verdict) -> None:
    assert pulp_verdict(status, solution) == expected


@pytest.mark.parametrize(
    ("best_s", "bound_s", "expected"),
    [
        (10.0, 10.0, SolveStatus.OPTIMAL),
        (10.0, 9.9999999, SolveStatus.OPTIMAL),
        (10.0, 9.0, SolveStatus.FEASIBLE),
        (math.inf, math.inf, SolveStatus.INFEASIBLE),
        (math.inf, 9.0, SolveStatus.NO_SOLUTION),
    ],
)
def test_search_status_of_best_and_bound(best_s: float, bound_s: float, expected: SolveStatus) -> None:
    assert search_status(best_s, bound_s, tolerance=1e-6) is expected


def test_relative_gap_is_the_share_of_the_plan_that_is_not_proved() -> None:
    assert [relative_gap(10.0, 9.0), relative_gap(10.0, 11.0), relative_gap(math.inf, 3.0)] == [
        pytest.approx(0.1),
        0.0,
        1.0,
    ]
