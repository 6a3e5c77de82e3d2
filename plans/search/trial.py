"""The recipes tried for one task on one set of GPUs, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

from plans.search.guesses import LayoutGuesses
from plans.search.layouts import Recipe, TaskLayout
from plans.search.recipe_table import RecipeTable

#: Layouts kept per set of GPUs.
KEPT = 16


@dataclass(frozen=True, slots=True)
class RankedLayout:
    """A layout with what it costs alone."""

    seconds: float
    """Seconds of the task."""
    share: float
    """Largest share of a GPU's usable memory that its model fills."""
    layout: TaskLayout
    """The layout."""


class _Tried(NamedTuple):
    """A layout that was tried."""

    seconds: float
    share: float
    recipe: Recipe
    """The last recipe that gave it."""


class Trial:
    """What was tried so far. Different recipes often give one layout, which is priced once."""

    def __init__(self, guesses: LayoutGuesses, price: Callable[[RecipeTable, int], None]) -> None:
        """Start with nothing.

        Args:
            guesses: source of the layouts.
            price: fills in hashes and prices of a table from a row on.
        """
        self._guesses, self._price = guesses, price
        self._table = RecipeTable(guesses)
        self._tried: set[Recipe] = set()
        self._layouts: dict[int, _Tried] = {}
        # Rank: layouts that fit alone, then those that do not, then recipes without a layout; the earlier among equals.
        self._order: list[tuple[bool, float, int, Recipe]] = []

    def attempt(self, recipes: Iterable[Recipe]) -> None:
        """Price the recipes that were not tried yet."""
        new = [recipe for recipe in dict.fromkeys(recipes) if recipe not in self._tried]
        if not new:
            return
        begin, table = len(self._table), self._table
        self._tried.update(new)
        table.extend(new)
        self._price(table, begin)
        answers = zip(new, table.hashes[begin:].tolist(), table.prices[begin:].tolist(), strict=True)
        for number, (recipe, layout, (seconds, share)) in enumerate(answers, begin):
            if layout:
                self._layouts[layout] = _Tried(seconds, share, recipe)
            self._order.append((share > 1.0, seconds, number, recipe))

    def leaders(self, count: int) -> list[Recipe]:
        """Return the best recipes, best first."""
        return [recipe for *_, recipe in nsmallest(count, self._order)]

    def best(self) -> tuple[RankedLayout, ...]:
        """Return the fastest layouts, and of the others those with less memory than every faster one."""
        fitting = [entry for entry in self._layouts.values() if math.isfinite(entry.seconds) and entry.share <= 1.0]
        fitting.sort(key=lambda entry: entry[:2])
        kept: list[RankedLayout] = []
        least = math.inf
        for position, (seconds, share, recipe) in enumerate(fitting):
            if position < KEPT // 2 or share < least * 0.95:
                layout = self._guesses.build(recipe)
                if layout is not None:
                    kept.append(RankedLayout(seconds, share, layout))
            least = min(least, share)
        return tuple(kept[:KEPT])
