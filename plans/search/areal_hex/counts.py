"""How many replicas of each configuration: the integer part of the rollout plan (AReaL-Hex, phase 1).

The printed program multiplies two unknowns (problem 1 of areal_hex.md 1.6). With fractional rollouts its optimum is
the largest total rate under the GPU limits, an integer knapsack; with whole rollouts the least deadline for which
the floors of what every replica finishes add up to the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from plans.errors import SolverUnavailableError

#: Relative fall of the deadline below which the descent ends.
DEADLINE_STEP = 1e-9
#: Rounds of the descent; each has a strictly better answer, and a handful suffice.
MAX_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Option:
    """A replica configuration psi as the counting sees it."""

    uses: Mapping[Hashable, int]
    """v: what one replica takes of each resource; resources may be nested."""
    tokens_per_s: float
    """h: throughput of one replica."""
    num_gpus: int
    """GPUs of one replica."""


def most_rate(options: Sequence[Option], capacity: Mapping[Hashable, int], rates: Sequence[float]) -> tuple[int, ...]:
    """Return counts y that maximise sum y * rate within the capacities, by an integer program.

    Args:
        options: the configurations.
        capacity: GPUs of each resource.
        rates: what one replica of each option contributes [n]; an option of rate 0 gets no replica.

    Raises:
        SolverUnavailableError: PuLP or HiGHS is not installed.
    """
    useful = [i for i, rate in enumerate(rates) if rate > 0.0 and _most(options[i], capacity) > 0]
    counts = [0] * len(options)
    if useful:
        scale = max(rates[i] for i in useful)
        solved = _solve([options[i] for i in useful], capacity, [rates[i] / scale for i in useful])
        for i, count in zip(useful, solved, strict=True):
            counts[i] = count
    return tuple(counts)


def greedy_counts(options: Sequence[Option], capacity: Mapping[Hashable, int]) -> tuple[int, ...]:
    """Return counts by filling up with the most tokens per GPU first: what `most_rate` replaces."""
    left = dict(capacity)
    counts = [0] * len(options)
    for i in sorted(range(len(options)), key=lambda i: (-options[i].tokens_per_s / options[i].num_gpus, i)):
        counts[i] = _most(options[i], left) if options[i].tokens_per_s > 0 else 0
        for resource, used in options[i].uses.items():
            left[resource] -= used * counts[i]
    return tuple(counts)


def fractional_makespan_s(
    options: Sequence[Option], counts: Sequence[int], rollouts: int, tokens_per_rollout: float
) -> float:
    """Return Theta with fractional rollouts: B * len / sum y h; infinite without a replica."""
    total = math.fsum(count * option.tokens_per_s for count, option in zip(counts, options, strict=True))
    return rollouts * tokens_per_rollout / total if total > 0 else math.inf


def pooled_makespan_s(
    options: Sequence[Option], counts: Sequence[int], rollouts: int, tokens_per_rollout: float
) -> float:
    """Return Theta with whole rollouts per configuration: least Theta with sum floor(Theta y h / len) >= B.

    The printed variables are per configuration, so its replicas together finish whole rollouts; a rollout that two
    replicas share does not exist, so `whole_makespan_s`, with floors per replica, is what plans use.
    """
    rates = [count * option.tokens_per_s / tokens_per_rollout for count, option in zip(counts, options, strict=True)]
    finishes = [lambda t, rate=rate: min(rollouts, math.floor(t * rate + 1e-9)) for rate in rates]
    slowest = min((rate for rate in rates if rate > 0), default=0.0)
    if slowest == 0.0:
        return math.inf
    return whole_makespan_s(finishes, [1] * len(rates), rollouts, 2.0 * rollouts / slowest)


def whole_makespan_s(
    capacity_at: Sequence[Callable[[float], int]], counts: Sequence[int], rollouts: int, upper_s: float
) -> float:
    """Return Theta with whole rollouts: the least deadline at which the replicas finish the batch, by bisection.

    Args:
        capacity_at: most rollouts that one replica of each option finishes by a deadline; non-decreasing.
        counts: replicas of each option.
        rollouts: B.
        upper_s: a deadline that suffices where any does.
    """

    def finished(deadline_s: float) -> int:
        return sum(count * most(deadline_s) for count, most in zip(counts, capacity_at, strict=True) if count > 0)

    if finished(upper_s) < rollouts:
        return math.inf
    low, high = 0.0, upper_s
    while high - low > 1e-12 * high:
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        if finished(middle) >= rollouts:
            high = middle
        else:
            low = middle
    return high


def best_whole_counts(
    options: Sequence[Option],
    capacity: Mapping[Hashable, int],
    capacity_at: Sequence[Callable[[float], int]],
    rollouts: int,
    upper_s: float,
) -> tuple[tuple[int, ...], float]:
    """Return the counts with the least whole-rollout makespan, and that makespan.

    Starts from the fractional optimum and asks, just below the best deadline so far, for counts that finish more
    rollouts by then; the deadline falls strictly with every answer, and where there is none it is the optimum.
    """
    counts = most_rate(options, capacity, [option.tokens_per_s for option in options])
    best_s = whole_makespan_s(capacity_at, counts, rollouts, upper_s)
    for _ in range(MAX_ROUNDS):
        deadline_s = (upper_s if math.isinf(best_s) else best_s) * (1.0 - DEADLINE_STEP)
        rates = [float(most(deadline_s)) for most in capacity_at]
        tried = most_rate(options, capacity, rates)
        if math.fsum(count * rate for count, rate in zip(tried, rates, strict=True)) < rollouts:
            break
        counts, best_s = tried, whole_makespan_s(capacity_at, tried, rollouts, upper_s)
    return counts, best_s


def _most(option: Option, capacity: Mapping[Hashable, int]) -> int:
    return min((capacity[resource] // used for resource, used in option.uses.items() if used > 0), default=0)


def _solve(options: Sequence[Option], capacity: Mapping[Hashable, int], rates: Sequence[float]) -> list[int]:
    try:
        import pulp

        from plans.search.quiet_highs import quiet_highs
    except ImportError as error:
        raise SolverUnavailableError(
            "Method areal-hex needs PuLP and HiGHS, which are not installed; install motley[planner]."
        ) from error
    program = pulp.LpProblem("replicas", pulp.LpMaximize)
    count = [
        program.add_variable(f"y{i}", 0, _most(option, capacity), pulp.LpInteger) for i, option in enumerate(options)
    ]
    program += pulp.lpSum(rate * variable for rate, variable in zip(rates, count, strict=True))
    for resource, limit in capacity.items():
        terms = [option.uses[resource] * count[i] for i, option in enumerate(options) if option.uses.get(resource)]
        if terms:
            program += pulp.lpSum(terms) <= limit
    program.solve(quiet_highs())
    return [round(variable.value() or 0.0) for variable in count]
