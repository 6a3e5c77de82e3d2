"""Integer replica counts against brute force, and what breaks without repair 1."""

import itertools
import math

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


def every_count(options, capacity):
    tops = [min(capacity[r] // n for r, n in option.uses.items()) for option in options]
    for counts in itertools.product(*(range(top + 1) for top in tops)):
        used = {r: sum(c * o.uses.get(r, 0) for c, o in zip(counts, options, strict=True)) for r in capacity}
        if all(used[r] <= capacity[r] for r in capacity):
            yield counts


def options_of(rows):
    return [Option(uses, rate, sum(uses.values())) for uses, rate in rows]


CASES = [
    (options_of([({"x": 1}, 3.0), ({"x": 3}, 10.0), ({"y": 2}, 4.0), ({"x": 1, "y": 1}, 5.5)]), {"x": 5, "y": 3}),
    (options_of([({"x": 2}, 7.0), ({"x": 3}, 11.0), ({"x": 5}, 18.4)]), {"x": 11}),
    (options_of([({"x": 4}, 1.0)]), {"x": 3}),
]


@pytest.mark.parametrize(("options", "capacity"), CASES)
def test_most_rate_equals_brute_force(options, capacity):
    rates = [option.tokens_per_s for option in options]
    best = max(
        math.fsum(c * r for c, r in zip(counts, rates, strict=True)) for counts in every_count(options, capacity)
    )
    found = most_rate(options, capacity, rates)
    assert found in set(every_count(options, capacity))
    assert math.fsum(c * r for c, r in zip(found, rates, strict=True)) == pytest.approx(best)


@pytest.mark.parametrize("rollouts", [1, 2, 7, 20])
@pytest.mark.parametrize(("options", "capacity"), CASES[:2])
def test_best_whole_counts_equals_brute_force(options, capacity, rollouts):
    capacity_at = [lambda t, o=o: min(rollouts, int(t * o.tokens_per_s / 100.0 + 1e-9)) for o in options]
    found, makespan_s = best_whole_counts(options, capacity, capacity_at, rollouts, 1e6)
    best = min(whole_makespan_s(capacity_at, counts, rollouts, 1e6) for counts in every_count(options, capacity))
    assert makespan_s == pytest.approx(best)
    assert whole_makespan_s(capacity_at, found, rollouts, 1e6) == makespan_s


def test_fractional_optimum_can_lose_with_whole_rollouts():
    # One rollout: the fastest single replica counts, not the largest sum of rates.
    options = options_of([({"x": 1}, 10.0), ({"x": 4}, 30.0)])
    capacity_at = [lambda t, o=o: min(1, int(t * o.tokens_per_s / 100.0 + 1e-9)) for o in options]
    fractional = most_rate(options, {"x": 4}, [10.0, 30.0])
    assert fractional == (4, 0)
    assert whole_makespan_s(capacity_at, fractional, 1, 1e6) == pytest.approx(10.0)
    assert best_whole_counts(options, {"x": 4}, capacity_at, 1, 1e6) == ((0, 1), pytest.approx(100.0 / 30.0))


def test_no_replica_takes_forever_where_the_printed_constraint_divides_by_zero():
    # The printed constraint is x * len / (y * h) <= Theta, undefined at y = 0.
    options = options_of([({"x": 1}, 10.0)])
    assert fractional_makespan_s(options, (0,), 5, 2000.0) == math.inf
    assert pooled_makespan_s(options, (0,), 5, 2000.0) == math.inf
    assert whole_makespan_s([lambda t: 5], (0,), 5, 1e6) == math.inf


def test_greedy_counts_lose_leftovers():
    options = options_of([({"x": 3}, 12.0), ({"x": 2}, 7.0)])
    assert greedy_counts(options, {"x": 4}) == (1, 0)
    assert most_rate(options, {"x": 4}, [12.0, 7.0]) == (0, 2)


def test_option_without_rate_gets_no_replica():
    options = options_of([({"x": 1}, 0.0), ({"x": 2}, 1.0)])
    assert most_rate(options, {"x": 5}, [0.0, 1.0]) == (0, 2)
    assert greedy_counts(options, {"x": 5}) == (0, 2)
