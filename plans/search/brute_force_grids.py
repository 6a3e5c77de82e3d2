"""Every placement of one task on the GPUs that it may use, once per class of interchangeable ones.

Two GPUs of one machine that nothing uses yet are interchangeable: relabelling them changes no price, so only the
first unused one of a machine is ever offered ("first use" order). GPUs that an earlier task of the group uses are
told apart. Replicas are unordered: of the orders that differ only by a permutation of replicas one is yielded. Their
order decides who gets a left-over sample among replicas of exactly equal speed, and ties of the weight transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import permutations


class RankOrder(Enum):
    """Which orders of the GPUs inside a TP stage are told apart."""

    ALL = auto()
    """All of them: the shard a rank holds decides the weight transfer (actor training and generation)."""
    BY_MACHINE = auto()
    """Orders of machines only: gradient rings join equal ranks (critic training)."""
    NONE = auto()
    """None: the task prices sets of GPUs (inference)."""


@dataclass(frozen=True, slots=True)
class Stock:
    """GPUs that a task may use."""

    named: tuple[int, ...]
    """GPUs that tasks of the same group use already."""
    fresh: tuple[tuple[int, ...], ...]
    """Unused GPUs of each machine, in index order."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel degrees of a task."""

    dp: int
    """Replicas."""
    pp: int
    """Stages per replica."""
    tp: int
    """Shards per stage."""

    @property
    def size(self) -> int:
        """GPUs."""
        return self.dp * self.pp * self.tp


def canonical_grids(
    degrees: Degrees,
    stock: Stock,
    machine_of: Sequence[int],
    rank_order: RankOrder,
    counts: Sequence[int] | None = None,
) -> Iterator[tuple[int, ...]]:
    """Yield GPU tuples [dp * pp * tp], one per class of placements that no price tells apart.

    Args:
        degrees: the degrees.
        stock: GPUs that the task may use.
        machine_of: machine by GPU.
        rank_order: which orders inside a stage count as different.
        counts: GPUs to take of each machine, exactly; absent = any.
    """
    yield from _GridWalk(degrees, stock, machine_of, rank_order, counts).run()


def every_grid(degrees: Degrees, gpus: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every assignment of GPUs to tasklets, without use of any symmetry."""
    yield from permutations(gpus, degrees.size)


class _GridWalk:
    """Depth-first walk over tokens: a used GPU by its index, the next unused GPU of machine m as N + m."""

    def __init__(
        self,
        degrees: Degrees,
        stock: Stock,
        machine_of: Sequence[int],
        rank_order: RankOrder,
        counts: Sequence[int] | None,
    ) -> None:
        self.degrees, self.stock, self.machine_of, self.rank_order = degrees, stock, machine_of, rank_order
        self.num_gpus = len(machine_of)
        self.left = [len(gpus) for gpus in stock.fresh]
        self.free = dict.fromkeys(sorted(stock.named), True)
        self.quota = list(counts) if counts is not None else [self.num_gpus] * len(stock.fresh)
        self.tokens: list[int] = []

    def run(self) -> Iterator[tuple[int, ...]]:
        if len(self.tokens) == self.degrees.size:
            yield self._labelled()
            return
        for token in self._choices():
            self._take(token, taken=True)
            if self._row_in_order():
                yield from self.run()
            self._take(token, taken=False)

    def _machine(self, token: int) -> int:
        return token - self.num_gpus if token >= self.num_gpus else self.machine_of[token]

    def _take(self, token: int, *, taken: bool) -> None:
        step = -1 if taken else 1
        if token >= self.num_gpus:
            self.left[token - self.num_gpus] += step
        else:
            self.free[token] = not taken
        self.quota[self._machine(token)] += step
        if taken:
            self.tokens.append(token)
        else:
            self.tokens.pop()

    def _choices(self) -> list[int]:
        named = [gpu for gpu, is_free in self.free.items() if is_free]
        fresh = [self.num_gpus + machine for machine, left in enumerate(self.left) if left]
        return [t for t in named + fresh if self.quota[self._machine(t)] > 0 and self._rank_in_order(t)]

    def _rank_in_order(self, token: int) -> bool:
        rank = len(self.tokens) % self.degrees.tp
        before = self.tokens[len(self.tokens) - rank :]
        if self.rank_order is RankOrder.ALL or not before:
            return True
        if self.rank_order is RankOrder.NONE:
            return token >= before[-1]
        machine = self._machine(token)
        return all(token >= other for other in before if self._machine(other) == machine)

    def _row_in_order(self) -> bool:
        """Tell whether a row that has just been completed does not come before the previous one."""
        width = self.degrees.pp * self.degrees.tp
        count = len(self.tokens)
        if count % width or count == width:
            return True
        return self.tokens[count - width :] >= self.tokens[count - 2 * width : count - width]

    def _labelled(self) -> tuple[int, ...]:
        following = [iter(gpus) for gpus in self.stock.fresh]
        return tuple(
            next(following[token - self.num_gpus]) if token >= self.num_gpus else token for token in self.tokens
        )
