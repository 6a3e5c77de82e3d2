"""Budgets and their meter."""

import pytest

from plans.errors import BudgetTooSmallError, SearchError
from plans.search.budget import Budget, Meter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", Budget(seconds=30.0)),
        ("0.5s", Budget(seconds=0.5)),
        ("2min", Budget(seconds=120.0)),
        ("1h", Budget(seconds=3600.0)),
        ("5000evals", Budget(evaluations=5000)),
        ("1e4evals", Budget(evaluations=10_000)),
    ],
)
def test_budget_text_gives_the_limit(text, expected):
    assert Budget.parse(text) == expected


@pytest.mark.parametrize("text", ["", "30", "s", "-3s", "nan s", "1.5evals", "10 minutes"])
def test_budget_unreadable_text_is_refused(text):
    with pytest.raises(SearchError, match="Budget"):
        Budget.parse(text)


def test_budget_of_zero_is_too_small():
    with pytest.raises(BudgetTooSmallError, match="positive"):
        Budget.parse("0s")


def test_budget_with_two_limits_is_refused():
    with pytest.raises(SearchError, match="exactly one"):
        Budget(evaluations=1, seconds=1.0)


def test_meter_in_seconds_needs_a_clock():
    with pytest.raises(SearchError, match="needs a clock"):
        Meter(Budget(seconds=1.0))


def test_meter_counts_evaluations_and_ends():
    meter = Meter(Budget(evaluations=3))
    meter.spend(2)
    assert (meter.remaining_evaluations, meter.is_spent, meter.evaluations) == (1, False, 2)
    meter.spend_at_most(10)
    assert (meter.evaluations, meter.is_spent, meter.termination) == (3, True, "budget")


def test_meter_in_seconds_follows_the_clock():
    now = [100.0]
    meter = Meter(Budget(seconds=10.0), lambda: now[0])
    now[0] = 104.0
    assert (meter.elapsed_s, meter.remaining_fraction, meter.is_spent) == (4.0, 0.6, False)
    now[0] = 111.0
    assert meter.is_spent


def test_meter_stop_request_is_remembered():
    answers = iter([False, True, False])
    meter = Meter(Budget(evaluations=5), should_stop=lambda: next(answers))
    assert [meter.is_spent, meter.is_spent, meter.is_spent] == [False, True, True]
    assert meter.termination == "stopped"
