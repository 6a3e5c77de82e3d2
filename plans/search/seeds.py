"""Random streams that depend on what they are for, never on who draws or when."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np

ItemT = TypeVar("ItemT")


class Draws:
    """A random stream for single draws: several times faster per draw than numpy's, and the same everywhere."""

    __slots__ = ("_source",)

    def __init__(self, seed: int) -> None:
        """Start the stream."""
        self._source = random.Random(seed)

    def random(self) -> float:
        """Return a number in [0, 1)."""
        return self._source.random()

    def below(self, count: int) -> int:
        """Return a whole number in [0, count)."""
        return int(self._source.random() * count)

    def between(self, low: int, high: int) -> int:
        """Return a whole number in [low, high]."""
        return low + int(self._source.random() * (high - low + 1))

    def pair(self, count: int) -> tuple[int, int]:
        """Return two different whole numbers in [0, count), in any order; count >= 2."""
        first = self.below(count)
        second = self.below(count - 1)
        return first, second + (second >= first)

    def sample(self, items: Sequence[int], count: int) -> list[int]:
        """Return so many different items in random order."""
        return self._source.sample(items, count)

    def permutation(self, count: int) -> list[int]:
        """Return the numbers 0 to count - 1 in random order."""
        return self._source.sample(range(count), count)

    def weighted(self, items: Sequence[ItemT], weights: Sequence[float]) -> ItemT:
        """Return an item drawn in proportion to positive weights."""
        return self._source.choices(items, weights)[0]

    def normals(self, count: int) -> list[float]:
        """Return independent standard normal numbers."""
        return [self._source.gauss(0.0, 1.0) for _ in range(count)]


def shares_below(weights: Sequence[float]) -> list[float]:
    """Return the upper edges of [0, 1) cut in proportion to weights; the last one is above 1."""
    total = sum(weights)
    edges = [edge / total for edge in accumulate(weights)]
    edges[-1] = 2.0
    return edges


def draws(seed: int, *identity: object) -> Draws:
    """Return the stream of single draws of a purpose, such as `draws(seed, "arm", grouping, sizes)`.

    The identity enters through its text, so equal identities give equal streams in every process.
    """
    return Draws(int.from_bytes(_digest(seed, *identity), "little"))


def stream(seed: int, *identity: object) -> np.random.Generator:
    """Return numpy's generator of a purpose, for distributions that `Draws` does not have."""
    digest = _digest(seed, *identity)
    return np.random.default_rng([int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)])


def _digest(seed: int, *identity: object) -> bytes:
    return hashlib.sha256("\x1f".join(str(part) for part in (seed, *identity)).encode()).digest()
