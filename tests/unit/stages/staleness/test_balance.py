from __future__ import annotations

from math import log

import pytest

from stages.staleness.balance import (
    Balance,
    drift,
    drift_is_due,
    measured_balance,
    predicted_balance,
    who_waits,
)


def balance(producer_s: float, consumer_s: float) -> Balance:
    return Balance(samples=60, producer_s=producer_s, consumer_s=consumer_s)


def test_rates_are_of_sides_that_never_wait() -> None:
    measured = measured_balance(
        60, {"plan": 9.0, "generate": 8.0, "infer": 2.0, "train": 4.0, "commit_policy": 0.5, "weight_sync": 0.5}
    )
    assert measured == balance(10.0, 5.0)
    assert (balance(10.0, 5.0).producer_samples_per_s, balance(10.0, 5.0).consumer_samples_per_s) == (6.0, 12.0)


def test_prediction_has_the_same_sides() -> None:
    phases = {"generation_s": 7.0, "inference_s": 1.0, "training_s": 3.0, "transfer_s": 1.0}
    assert predicted_balance(60, phases) == balance(8.0, 4.0)


@pytest.mark.parametrize("measured_s", [{}, {"generate": 1.0}, {"train": 1.0}, {"generate": 0.0, "train": 1.0}])
def test_unknown_side_gives_no_balance(measured_s: dict[str, float]) -> None:
    assert measured_balance(60, measured_s) is None


@pytest.mark.parametrize(
    ("producer_s", "consumer_s", "sentence"),
    [
        (10.0, 5.0, "training waits for generation (5.0 s of work against 10.0 s)"),
        (5.0, 10.0, "generation waits for training (5.0 s of work against 10.0 s)"),
        (10.0, 9.5, "generation and training keep step (10.0 s and 9.5 s)"),
    ],
)
def test_report_names_who_waits_for_whom(producer_s: float, consumer_s: float, sentence: str) -> None:
    assert who_waits(balance(producer_s, consumer_s)) == sentence


def test_drift_is_of_the_balance_and_not_of_the_speed() -> None:
    assert drift(balance(20.0, 10.0), balance(2.0, 1.0)) == 0.0
    assert drift(balance(20.0, 10.0), balance(1.0, 1.0)) == pytest.approx(log(2))
    assert drift(balance(5.0, 10.0), balance(1.0, 1.0)) == pytest.approx(log(2))


HIGH, MIDDLE, LOW = 0.8, 0.5, 0.1
"""Against a limit of 1, whose logarithm is 0.69: above, between half and whole, below half."""


@pytest.mark.parametrize(
    ("drifts", "calls"),
    [
        ([], False),
        ([HIGH], False),
        ([HIGH, HIGH], True),
        ([HIGH, LOW, HIGH], False),
        ([HIGH, HIGH, HIGH], False),
        ([HIGH, HIGH, MIDDLE, HIGH, HIGH], False),
        ([HIGH, HIGH, LOW, HIGH, HIGH], True),
        ([MIDDLE] * 9, False),
    ],
)
def test_drift_calls_once_when_it_lasts_and_again_only_after_it_was_gone(drifts: list[float], calls: bool) -> None:
    assert drift_is_due(drifts, limit=1.0, confirm=2) is calls
