"""Nested successive halving over groupings and their arms (HetRL, Algorithm 1). Knows arms by their scores only.

Differences to the listing, none of which changes the shares: the inner loops of all groupings advance together, so
that their arms can grow in parallel; at least one round each; the shares are taken of what is really left, which in a
budget of seconds corrects the estimate of the speed after each round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

ArmT = TypeVar("ArmT")

Score = tuple[float, ...]
"""Rank of an arm: smaller is better."""


Grow = Callable[[Sequence[tuple[ArmT, int]]], None]
"""Spend so many evaluations on each arm."""


class NestedHalving(Generic[ArmT]):
    """The tournament."""

    def __init__(
        self,
        grow: Grow[ArmT],
        score: Callable[[ArmT], Score],
        remaining: Callable[[], float],
        keep_going: Callable[[], bool],
    ) -> None:
        """Keep the callbacks.

        Args:
            grow: spends evaluations on arms.
            score: rank of an arm; arms without a feasible plan rank last.
            remaining: evaluations that the tournament may still spend (an estimate in a budget of seconds).
            keep_going: asked before each round.
        """
        self._grow, self._score, self._remaining, self._keep_going = grow, score, remaining, keep_going

    def run(self, groups: Sequence[Sequence[ArmT]]) -> list[ArmT]:
        """Run all rounds; return the surviving arms, best first.

        Args:
            groups: the arms of each grouping.
        """
        alive = [list(arms) for arms in groups if arms]
        rounds = rounds_of(len(alive))
        for outer in range(rounds):
            alive = self._outer_round(alive, self._remaining() / (rounds - outer))
            if not self._keep_going():
                break
            alive.sort(key=lambda arms: min(self._score(arm) for arm in arms))
            alive = [self._better_half(arms) for arms in alive[: _half(len(alive))]]
        survivors = [arm for arms in alive for arm in arms]
        return self._sorted(survivors)

    def _outer_round(self, alive: list[list[ArmT]], budget: float) -> list[list[ArmT]]:
        """Halve inside every grouping, all groupings in step; return the groupings with all their arms."""
        spent_before = self._remaining()
        standing = [list(arms) for arms in alive]
        rounds = [rounds_of(len(arms)) for arms in alive]
        for inner in range(max(rounds)):
            if not self._keep_going():
                break
            left = budget - (spent_before - self._remaining())
            share = max(0.0, left) / (len(alive) * (max(rounds) - inner))
            jobs = [
                (arm, max(1, int(share / len(arms))))
                for arms, own in zip(standing, rounds, strict=True)
                if inner < own
                for arm in arms
            ]
            self._grow(jobs)
            standing = [self._better_half(arms) for arms in standing]
        return alive

    def _better_half(self, arms: list[ArmT]) -> list[ArmT]:
        return self._sorted(arms)[: _half(len(arms))]

    def _sorted(self, arms: list[ArmT]) -> list[ArmT]:
        return sorted(arms, key=self._score)


def rounds_of(count: int) -> int:
    """Return ceil(log2(count)), at least 1."""
    return max(1, math.ceil(math.log2(max(1, count))))


def least_budget(num_groups: int, arms_per_group: int, per_arm: int) -> int:
    """Return the evaluations at which each arm of the first round gets `per_arm` of them."""
    outer, inner = rounds_of(num_groups), rounds_of(arms_per_group)
    return num_groups * outer * arms_per_group * inner * per_arm


def _half(count: int) -> int:
    return max(1, (count + 1) // 2)
