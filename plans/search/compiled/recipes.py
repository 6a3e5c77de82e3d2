"""Recipes of one task, laid out and priced alone, many in one call."""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.jit import borrowed, compiled
from plans.cost.compiled.plain import PlainTables
from plans.cost.compiled.tables import (
    DP,
    MICRO_BATCH,
    NUM_SHAPE,
    PP,
    SPLIT,
    SPLIT_SPEED,
    TP,
    FloatArray,
    HashArray,
    IntArray,
)
from plans.cost.compiled.whole_plan import price_alone
from plans.search.compiled.layouts import lay_out

#: Columns of a recipe: where the speeds and the GPUs of its units begin, how many units, degrees, arrangement.
UNITS_AT, GPUS_AT, NUM_UNITS, RECIPE_PP, RECIPE_TP, ARRANGEMENT, NUM_RECIPE = range(7)


@compiled
def price_recipes(
    plain: PlainTables, strategies: IntArray, task: int, mbs: int, held_bytes: float, units: IntArray,
    speeds: FloatArray, recipes: IntArray, first: int, hashes: HashArray, prices: FloatArray,
) -> int:  # fmt: skip
    """Price recipes from `first` on, each layout once; return the number of the first one that waits for a ring.

    Args:
        plain: the constants.
        strategies: which of the strategies of load balancing are used [3].
        task: row of the task.
        mbs: samples per micro-batch.
        held_bytes: bytes of other models on each GPU.
        units: GPUs of all sets of units, one after the other.
        speeds: speeds of all units.
        recipes: the recipes [recipes, NUM_RECIPE].
        first: number of the first recipe to price; those before are done.
        hashes: hash of each recipe's layout [recipes]; 0 = there is none.
        prices: seconds and share of memory of each recipe (`price_alone`) [recipes, 2].
    """
    strategies, units, speeds, recipes = borrowed(strategies), borrowed(units), borrowed(speeds), borrowed(recipes)
    hashes, prices, asked = borrowed(hashes), borrowed(prices), plain[3][5]
    gpus, row = np.empty(len(units), dtype=np.int64), np.zeros(NUM_SHAPE, dtype=np.int64)
    for index in range(first, len(recipes)):
        pp, tp = recipes[index, RECIPE_PP], recipes[index, RECIPE_TP]
        at, start, count = recipes[index, UNITS_AT], recipes[index, GPUS_AT], recipes[index, NUM_UNITS]
        own, own_speeds = units[start : start + count * tp], speeds[at : at + count]
        dp = lay_out(own, own_speeds, pp, tp, recipes[index, ARRANGEMENT], gpus)
        placed = gpus[: dp * pp * tp]
        hashes[index] = layout_hash(placed, pp, tp) if dp else np.uint64(0)
        prices[index, 0] = prices[index, 1] = math.inf
        known = _find(hashes, index)
        if known >= 0:
            prices[index] = prices[known]
        elif dp:
            row[DP], row[PP], row[TP], row[MICRO_BATCH], row[SPLIT] = dp, pp, tp, mbs, SPLIT_SPEED
            prices[index, 0], prices[index, 1] = price_alone(plain, strategies, task, row, placed, held_bytes)
            if asked[0]:
                return index
    return len(recipes)


@compiled
def layout_hash(gpus: IntArray, pp: int, tp: int) -> np.uint64:
    """Return a hash of a layout that is not 0: 64 bits tell some hundred layouts apart."""
    found = (np.uint64(pp) << np.uint64(32)) + np.uint64(tp)
    for gpu in gpus:
        found = found + np.uint64(gpu) + np.uint64(0x9E3779B97F4A7C15)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found = found ^ (found >> np.uint64(31))
    return max(found, np.uint64(1))


@compiled
def _find(hashes: HashArray, index: int) -> int:
    """Return an earlier recipe with the same layout, or none; -1 = it is new."""
    for other in range(index):
        if hashes[other] == hashes[index]:
            return other
    return -1
