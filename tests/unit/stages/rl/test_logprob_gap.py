"""The log-prob canary."""

from __future__ import annotations

import numpy as np
import pytest

from stages.errors import NumericsError
from stages.rl.logprob_gap import LogprobGap, check_logprob_gap, measure_logprob_gap


def test_gap_counts_unmasked_tokens_only() -> None:
    gap = measure_logprob_gap(
        np.array([[-1.0, -2.0, 9.0]]), np.array([[-1.5, -2.0, 0.0]]), np.array([[True, True, False]])
    )
    assert gap == LogprobGap(mean_abs=0.25, max_abs=0.5, num_tokens=2)


def test_l13_gap_over_the_limit_stops_with_numbers() -> None:
    gap = LogprobGap(mean_abs=0.7, max_abs=1.2, num_tokens=5)
    with pytest.raises(NumericsError, match=r"sync of version 3: .* differ by 0\.7 nats .* soft-cap"):
        check_logprob_gap(gap, max_mean_abs=0.01, where="sync of version 3")


def test_gap_with_nan_never_passes() -> None:
    gap = measure_logprob_gap(np.array([[np.nan]]), np.array([[0.0]]), np.array([[True]]))
    with pytest.raises(NumericsError, match="inf nats"):
        check_logprob_gap(gap, max_mean_abs=1e9, where="start")


def test_gap_of_no_tokens_is_not_a_proof() -> None:
    gap = measure_logprob_gap(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1), bool))
    with pytest.raises(NumericsError, match="no tokens to compare"):
        check_logprob_gap(gap, max_mean_abs=1.0, where="start")


def test_gap_within_the_limit_passes() -> None:
    assert (
        check_logprob_gap(LogprobGap(mean_abs=1e-5, max_abs=1e-4, num_tokens=9), max_mean_abs=1e-3, where="x") is None
    )
