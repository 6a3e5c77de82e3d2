"""The worked example of areal_hex.md 1.7: two GPU types, five configurations, 256 rollouts of 2,000 tokens."""

import itertools
from functools import partial

import pytest

from plans.search.areal_hex.counts import (
    Option,
    best_whole_counts,
    fractional_makespan_s,
    greedy_counts,
    most_rate,
    pooled_makespan_s,
    whole_makespan_s,
)

CAPS = {"A": 4, "B": 10}
ROLLOUTS, TOKENS = 256, 2000
NAMES = ("a1", "a2", "b2", "b4", "ab")
OPTIONS = (
    Option({"A": 1}, 100.0, 1),
    Option({"A": 2}, 230.0, 2),
    Option({"B": 2}, 120.0, 2),
    Option({"B": 4}, 260.0, 4),
    Option({"A": 1, "B": 2}, 240.0, 3),
)
RATES = tuple(option.tokens_per_s for option in OPTIONS)


def finished_by(rate, deadline_s):
    return min(ROLLOUTS, int(deadline_s * rate / TOKENS + 1e-9))


CAPACITY_AT = tuple(partial(finished_by, rate) for rate in RATES)


def rate_of(counts):
    return sum(count * rate for count, rate in zip(counts, RATES, strict=True))


def test_oracle_best_counts_are_two_a2_one_b2_two_b4_with_1100_tokens_per_second():
    counts = most_rate(OPTIONS, CAPS, RATES)
    assert dict(zip(NAMES, counts, strict=True)) == {"a1": 0, "a2": 2, "b2": 1, "b4": 2, "ab": 0}
    assert rate_of(counts) == 1100.0


def test_oracle_makespan_with_fractional_rollouts_is_465_4545_s():
    counts = most_rate(OPTIONS, CAPS, RATES)
    assert fractional_makespan_s(OPTIONS, counts, ROLLOUTS, TOKENS) == pytest.approx(465.4545, abs=5e-5)


def test_oracle_makespan_with_whole_rollouts_is_466_667_s():
    counts = most_rate(OPTIONS, CAPS, RATES)
    assert pooled_makespan_s(OPTIONS, counts, ROLLOUTS, TOKENS) == pytest.approx(466.667, abs=5e-4)
    every = itertools.product(range(5), range(3), range(6), range(3), range(5))
    fitting = [y for y in every if y[0] + 2 * y[1] + y[4] <= 4 and 2 * y[2] + 4 * y[3] + 2 * y[4] <= 10]
    makespans = [pooled_makespan_s(OPTIONS, y, ROLLOUTS, TOKENS) for y in fitting]
    assert min(makespans) == pytest.approx(466.667, abs=5e-4)


def test_oracle_with_floors_per_replica_takes_a_little_longer():
    counts, makespan_s = best_whole_counts(OPTIONS, CAPS, CAPACITY_AT, ROLLOUTS, 1e5)
    assert dict(zip(NAMES, counts, strict=True)) == {"a1": 0, "a2": 2, "b2": 1, "b4": 2, "ab": 0}
    # 61 rollouts on each b4, 53 on each a2, 28 on b2.
    assert makespan_s == pytest.approx(61 * TOKENS / 260)
    assert whole_makespan_s(CAPACITY_AT, counts, ROLLOUTS, 1e5) == makespan_s


def test_oracle_greedy_by_tokens_per_gpu_is_beaten_on_neighbouring_caps():
    losses = {}
    for a in range(1, 7):
        for b in range(1, 13):
            caps = {"A": a, "B": b}
            best, greedy = rate_of(most_rate(OPTIONS, caps, RATES)), rate_of(greedy_counts(OPTIONS, caps))
            assert greedy <= best + 1e-9
            if greedy < best - 1e-9:
                losses[a, b] = best - greedy
    assert losses[3, 10] == pytest.approx(20.0)
