"""Layouts of one task on one set of GPUs ranked by their own cost: a coordinate search over recipes in one call.

Plain recipes first, then rounds of single changes of the best ones. Different recipes often give one layout, which is
priced once. Where a ring has to be solved by Python first, the call returns and goes on where it was when it is
called again with the same arrays.
"""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import are_equal, copy_to, fill
from plans.cost.compiled.doors import tables_at
from plans.cost.compiled.jit import borrowed, compiled, inner
from plans.cost.compiled.tables import (
    DP,
    MICRO_BATCH,
    NUM_SHAPE,
    PP,
    SPLIT,
    SPLIT_SPEED,
    TP,
    FloatArray,
    IntArray,
    Tables,
)
from plans.cost.compiled.whole_plan import price_alone
from plans.search.compiled.layouts import REPLICA_BLOCKS
from plans.search.compiled.recipes import (
    ARRANGEMENT,
    BY_TYPE,
    RECIPE_PP,
    RECIPE_TP,
    SUBSET,
    choices_at,
    count_units,
    lay_out_recipe,
    offered_degrees,
)
from plans.search.guesses import Choices

#: Rounds of single changes around the best recipes.
CLIMB_ROUNDS = 4
#: Recipes around which a deep ranking looks; another looks around the best one.
CLIMBERS = 3
#: Layouts kept per set of GPUs.
KEPT = 16
#: Ways to arrange units.
NUM_ARRANGEMENTS = 3
#: Neighbours of a pipeline degree that a single change tries on either side.
NEAR_PPS = 2
#: Single changes of a recipe beside those of machines and TP: arrangements, machine order, pipeline degrees.
OTHER_CHANGES = NUM_ARRANGEMENTS + 1 + 2 * NEAR_PPS
#: Entries of the state of a ranking: recipes so far, those priced, rounds done, recipes when the last round began.
RECIPES, PRICED, ROUNDS, RECIPES_BEFORE, NUM_STATE = range(5)


def most_recipes(choices: Choices) -> int:
    """Return how many recipes a ranking tries at most."""
    num_subsets, tps = choices.tps.shape
    pps = choices.pps.shape[1]
    return tps * pps * NUM_ARRANGEMENTS + CLIMB_ROUNDS * CLIMBERS * (num_subsets + tps + OTHER_CHANGES)


@compiled
def rank_recipes(
    words: IntArray, strategies: IntArray, task: int, mbs: int, held_bytes: float, choice_words: IntArray,
    is_deep: bool, state: IntArray, recipes: IntArray, hashes: IntArray, prices: FloatArray,
) -> bool:  # fmt: skip
    """Try recipes until no single change of the best ones is new; False where a ring has to be solved first.

    Args:
        words: the words of the tables.
        strategies: which of the strategies of load balancing are used [3].
        task: row of the task.
        mbs: samples per micro-batch.
        held_bytes: bytes of other models on each GPU.
        choice_words: the words of the `Choices`: what the GPUs allow.
        is_deep: try every pipeline degree on offer, all arrangements, and the changes of several recipes.
        state: how far the ranking is [NUM_STATE]; 0 at first.
        recipes: the recipes tried [most, NUM_RECIPE].
        hashes: hash of each recipe's layout [most]; 0 = there is none.
        prices: seconds and share of memory of each recipe (`price_alone`) [most, 2]; infinite without a layout.
    """
    tables, choices, strategies = tables_at(words), choices_at(choice_words), borrowed(strategies)
    state, recipes, hashes, prices = borrowed(state), borrowed(recipes), borrowed(hashes), borrowed(prices)
    count = CLIMBERS if is_deep else 1
    leaders, before = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    if state[RECIPES] == 0:
        _add_plain(choices, is_deep, state, recipes)
    _find_leaders(state[RECIPES_BEFORE], prices, before)
    while True:
        if not _price(tables, strategies, task, mbs, held_bytes, choices, state, recipes, hashes, prices):
            return False
        _find_leaders(state[RECIPES], prices, leaders)
        if state[ROUNDS] == CLIMB_ROUNDS or are_equal(leaders, before):
            return True
        state[RECIPES_BEFORE] = state[RECIPES]
        for leader in leaders:
            if leader >= 0 and not _is_in(leader, before):
                _add_changes(choices, recipes[leader], state, recipes)
        copy_to(before, leaders)
        state[ROUNDS] += 1


@inner
def _is_in(number: int, numbers: IntArray) -> bool:
    for other in numbers:
        if other == number:
            return True
    return False


@inner
def _add(state: IntArray, recipes: IntArray, subset: int, tp: int, pp: int, by_type: int, arrangement: int) -> None:
    """Append a recipe that was not tried yet."""
    count = state[RECIPES]
    for index in range(count):
        if (
            recipes[index, RECIPE_PP] == pp
            and recipes[index, RECIPE_TP] == tp
            and recipes[index, SUBSET] == subset
            and recipes[index, BY_TYPE] == by_type
            and recipes[index, ARRANGEMENT] == arrangement
        ):
            return
    row = recipes[count]
    row[SUBSET], row[RECIPE_TP], row[RECIPE_PP], row[BY_TYPE], row[ARRANGEMENT] = subset, tp, pp, by_type, arrangement
    state[RECIPES] = count + 1


@inner
def _add_plain(choices: Choices, is_deep: bool, state: IntArray, recipes: IntArray) -> None:
    """Append the plain recipes: all GPUs, near order, every TP; PP by powers of two and replica blocks unless deep."""
    degrees = np.empty(choices.pps.shape[1], dtype=np.int64)
    subset = by_type = np.int64(0)  # numba would make more functions for a literal 0
    for tp in choices.tps[subset]:
        if tp == 0:
            break
        offered = offered_degrees(choices, tp, count_units(choices, subset, tp), degrees)
        for arrangement in range(NUM_ARRANGEMENTS if is_deep else REPLICA_BLOCKS + 1):
            for index in range(offered):
                pp = degrees[index]
                if is_deep or pp & (pp - 1) == 0 or index == 0:
                    _add(state, recipes, subset, tp, pp, by_type, arrangement)


@inner
def _add_changes(choices: Choices, recipe: IntArray, state: IntArray, recipes: IntArray) -> None:
    """Append the recipes that differ from one in a single coordinate."""
    subset, tp, pp, by_type = recipe[SUBSET], recipe[RECIPE_TP], recipe[RECIPE_PP], recipe[BY_TYPE]
    arrangement = recipe[ARRANGEMENT]
    for other in range(NUM_ARRANGEMENTS):
        _add(state, recipes, subset, tp, pp, by_type, other)
    _add(state, recipes, subset, tp, pp, 1 - by_type, arrangement)
    for other in range(len(choices.subsets)):
        _add(state, recipes, other, tp, pp, by_type, arrangement)
    for other in choices.tps[subset]:
        if other:
            _add(state, recipes, subset, other, pp, by_type, arrangement)
    degrees = np.empty(choices.pps.shape[1], dtype=np.int64)
    offered = offered_degrees(choices, tp, count_units(choices, subset, tp), degrees)
    for at in range(offered):
        if degrees[at] == pp:
            for near in range(max(0, at - NEAR_PPS), min(offered, at + NEAR_PPS + 1)):
                _add(state, recipes, subset, tp, degrees[near], by_type, arrangement)


@inner
def _price(
    tables: Tables, strategies: IntArray, task: int, mbs: int, held_bytes: float, choices: Choices,
    state: IntArray, recipes: IntArray, hashes: IntArray, prices: FloatArray,
) -> bool:  # fmt: skip
    """Price the recipes that have no price yet; False where a ring has to be solved first."""
    size, asked = choices.gpus.shape[1], tables.rings.num_asked
    gpus, units, unit_speeds = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64), np.empty(size)
    row = np.zeros(NUM_SHAPE, dtype=np.int64)
    for index in range(state[PRICED], state[RECIPES]):
        pp, tp = recipes[index, RECIPE_PP], recipes[index, RECIPE_TP]
        dp = lay_out_recipe(choices, recipes[index], units, unit_speeds, gpus)
        placed = gpus[: dp * pp * tp]
        hashes[index] = layout_hash(placed, pp, tp) if dp else 0
        prices[index, 0] = prices[index, 1] = math.inf
        known = _first_of(hashes, index)
        if known < index:
            prices[index, 0], prices[index, 1] = prices[known, 0], prices[known, 1]
        elif dp:
            row[DP], row[PP], row[TP], row[MICRO_BATCH], row[SPLIT] = dp, pp, tp, mbs, SPLIT_SPEED
            prices[index, 0], prices[index, 1] = price_alone(tables, strategies, task, row, placed, held_bytes)
            if asked[0]:
                state[PRICED] = index
                return False
    state[PRICED] = state[RECIPES]
    return True


@inner
def layout_hash(gpus: IntArray, pp: int, tp: int) -> int:
    """Return a hash of a layout that is not 0: 64 bits tell some hundred layouts apart."""
    found = (np.uint64(pp) << np.uint64(32)) + np.uint64(tp)
    for gpu in gpus:
        found = found + np.uint64(gpu) + np.uint64(0x9E3779B97F4A7C15)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found = found ^ (found >> np.uint64(31))
    return np.int64(max(found, np.uint64(1)))


@inner
def _first_of(hashes: IntArray, index: int) -> int:
    """Return the first recipe with the same layout, or none."""
    for other in range(index):
        if hashes[other] == hashes[index]:
            return other
    return index


@inner
def _find_leaders(count: int, prices: FloatArray, leaders: IntArray) -> None:
    """Write the best of the first recipes, best first; -1 where there are fewer.

    Layouts that fit alone come first, then those that do not, then recipes without one; the earlier among equals.
    """
    fill(leaders, -1)
    for place in range(min(len(leaders), count)):
        best = -1
        for index in range(count):
            if not _is_in(index, leaders[:place]) and (best < 0 or _is_better(prices[index], prices[best])):
                best = index
        leaders[place] = best


@inner
def _is_better(price: FloatArray, other: FloatArray) -> bool:
    overfull, overfull_other = price[1] > 1.0, other[1] > 1.0
    return price[0] < other[0] if overfull == overfull_other else overfull_other


@compiled
def keep_best(
    choice_words: IntArray, state: IntArray, recipes: IntArray, hashes: IntArray, prices: FloatArray, kept: IntArray,
    replicas: IntArray, gpus: IntArray,
) -> int:  # fmt: skip
    """Write the fastest layouts, and of the others those with less memory than every faster one; return how many.

    Args:
        choice_words: the words of the `Choices`: what the GPUs allow.
        state: how far the ranking is: done.
        recipes: the recipes tried.
        hashes: hashes of their layouts.
        prices: seconds and share of memory of each.
        kept: last recipe of each layout that is kept [KEPT], fastest first.
        replicas: its replicas [KEPT].
        gpus: its GPUs [KEPT, G].
    """
    choices, state, recipes, hashes = choices_at(choice_words), borrowed(state), borrowed(recipes), borrowed(hashes)
    prices, kept, replicas, gpus = borrowed(prices), borrowed(kept), borrowed(replicas), borrowed(gpus)
    order = _fitting(state[RECIPES], hashes, prices)
    units, unit_speeds = np.empty(gpus.shape[1], dtype=np.int64), np.empty(gpus.shape[1])
    found, least = 0, math.inf
    for place in range(len(order)):
        first, share = order[place], prices[order[place], 1]
        if place < KEPT // 2 or share < least * 0.95:
            for index in range(first, state[RECIPES]):
                if hashes[index] == hashes[first]:
                    kept[found] = index
            replicas[found] = lay_out_recipe(choices, recipes[kept[found]], units, unit_speeds, gpus[found])
            found += 1
            if found == KEPT:
                break
        least = min(least, share)
    return found


@inner
def _fitting(count: int, hashes: IntArray, prices: FloatArray) -> IntArray:
    """Return the first recipe of each layout that fits alone, by seconds, then share, then which came first."""
    order, found = np.empty(count, dtype=np.int64), 0
    for index in range(count):
        seconds, share = prices[index, 0], prices[index, 1]
        if not hashes[index] or not math.isfinite(seconds) or share > 1.0 or _first_of(hashes, index) < index:
            continue
        place = found
        while place and (
            seconds < prices[order[place - 1], 0]
            or (seconds == prices[order[place - 1], 0] and share < prices[order[place - 1], 1])
        ):
            order[place] = order[place - 1]
            place -= 1
        order[place] = index
        found += 1
    return order[:found]
