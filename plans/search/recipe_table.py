"""Recipes of one task on one set of GPUs as arrays, for machine code to price (`plans.search.compiled.recipes`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plans.search.guesses import ARRANGEMENTS, LayoutGuesses
from plans.search.layouts import Recipe
from plans.search.units import Units
from plans.spec.cluster import FloatArray, IntArray

_NUMBERS = {arrangement: number for number, arrangement in enumerate(ARRANGEMENTS)}
#: Row of a recipe whose degrees the GPUs do not allow: no units.
_NO_LAYOUT = (0, 0, 0, 1, 1, 0)


class RecipeTable:
    """Recipes with their prices; it only grows."""

    def __init__(self, guesses: LayoutGuesses) -> None:
        """Start with nothing."""
        self._guesses = guesses
        # Sets of units by identity, with the place of their speeds and of their GPUs.
        self._begins: dict[int, tuple[int, int]] = {}
        self._sets: list[Units] = []
        self._ends = 0, 0
        self.units: IntArray = np.empty(0, dtype=np.int64)
        """GPUs of all sets of units, one after the other."""
        self.speeds: FloatArray = np.empty(0)
        """Speeds of all units."""
        self.rows: IntArray = np.empty((0, len(_NO_LAYOUT)), dtype=np.int64)
        """The recipes [recipes, NUM_RECIPE]."""
        self.hashes: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        """Hash of each recipe's layout [recipes]; 0 = there is none."""
        self.prices: FloatArray = np.empty((0, 2))
        """Seconds and share of memory of each [recipes, 2]; infinite where there is no layout or it can't run."""

    def __len__(self) -> int:
        return len(self.rows)

    def extend(self, recipes: Sequence[Recipe]) -> None:
        """Append recipes, not priced yet."""
        rows = [self._row(recipe) for recipe in recipes]
        self.rows = np.concatenate((self.rows, np.array(rows, dtype=np.int64)))
        self.hashes = np.concatenate((self.hashes, np.zeros(len(rows), dtype=np.uint64)))
        self.prices = np.concatenate((self.prices, np.empty((len(rows), 2))))
        self.units = np.concatenate([units.gpus for units in self._sets] or [self.units])
        self.speeds = np.concatenate([units.speeds for units in self._sets] or [self.speeds])

    def _row(self, recipe: Recipe) -> tuple[int, ...]:
        units = self._guesses.units_of(recipe)
        if units is None:
            return _NO_LAYOUT
        begins = self._begins.get(id(units))
        if begins is None:
            begins = self._begins[id(units)] = self._ends
            self._sets.append(units)  # kept alive, so that no other gets its identity
            self._ends = begins[0] + units.count, begins[1] + len(units.gpus)
        return (*begins, units.count, recipe.pp, recipe.tp, _NUMBERS[recipe.arrangement])
