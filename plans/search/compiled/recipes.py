"""Recipes of one task on one set of GPUs: which units a recipe takes, and how they are laid out.

What the GPUs allow are the `Choices` of `plans.search.guesses`.
"""

from __future__ import annotations

import numpy as np

from plans.cost.compiled.jit import borrowed, compiled, inner
from plans.cost.compiled.tables import FloatArray, IntArray
from plans.cost.compiled.words import reader_of
from plans.search.compiled.layouts import lay_out
from plans.search.guesses import Choices

#: Columns of a recipe: the fields of `plans.search.layouts.Recipe`.
SUBSET, RECIPE_TP, RECIPE_PP, BY_TYPE, ARRANGEMENT, NUM_RECIPE = range(6)
#: Entries of `Choices.bounds`.
LAYERS, LEAST_SHARDS = range(2)


choices_at = reader_of(Choices)


@inner
def count_units(choices: Choices, subset: int, tp: int) -> int:
    """Return how many sets of `tp` GPUs of one machine a subset of the machines has."""
    machines, is_in = choices.machines[0], choices.subsets[subset]
    held = np.zeros(len(is_in), dtype=np.int64)
    for machine in machines:
        held[machine] += is_in[machine]
    count = 0
    for gpus in held:
        count += gpus // tp
    return count


@inner
def cut_units(choices: Choices, subset: int, tp: int, by_type: int, units: IntArray, unit_speeds: FloatArray) -> int:
    """Write the GPUs and the speed of each unit of a subset along the machine order; return how many there are.

    What a machine has left over is not used.
    """
    gpus, machines = choices.gpus[by_type], choices.machines[by_type]
    speeds, is_in = choices.speeds, choices.subsets[subset]
    begin = count = 0
    while begin < len(gpus):
        machine, end = machines[begin], begin
        while end < len(gpus) and machines[end] == machine:
            end += 1
        for unit in range((end - begin) // tp if is_in[machine] else 0):
            for rank in range(tp):
                units[count * tp + rank] = gpus[begin + unit * tp + rank]
            unit_speeds[count] = speeds[machine]
            count += 1
        begin = end
    return count


@inner
def lay_out_recipe(choices: Choices, recipe: IntArray, units: IntArray, unit_speeds: FloatArray, gpus: IntArray) -> int:
    """Write the GPUs of a recipe's layout; return its replicas, 0 where the GPUs do not allow its degrees.

    Args:
        choices: what the GPUs allow.
        recipe: the recipe [NUM_RECIPE].
        units: scratch [G].
        unit_speeds: scratch [G].
        gpus: the answer [G].
    """
    subset, tp, pp, bounds = recipe[SUBSET], recipe[RECIPE_TP], recipe[RECIPE_PP], choices.bounds
    if subset >= len(choices.subsets) or pp * tp < bounds[LEAST_SHARDS] or pp > bounds[LAYERS]:
        return 0
    count = cut_units(choices, subset, tp, recipe[BY_TYPE], units, unit_speeds)
    return lay_out(units[: count * tp], unit_speeds[:count], pp, tp, recipe[ARRANGEMENT], gpus) if pp <= count else 0


@compiled
def build_recipe(words: IntArray, recipe: IntArray, gpus: IntArray) -> int:
    """Write the GPUs of a recipe's layout, as `lay_out_recipe`, for Python, given the words of the `Choices`."""
    units, unit_speeds = np.empty(len(gpus), dtype=np.int64), np.empty(len(gpus))
    return lay_out_recipe(choices_at(words), borrowed(recipe), units, unit_speeds, borrowed(gpus))


@inner
def offered_degrees(choices: Choices, tp: int, num_units: int, degrees: IntArray) -> int:
    """Write the pipeline degrees whose shards can fit a GPU, least first, else the largest; return how many."""
    offered, least = choices.pps[num_units], choices.bounds[LEAST_SHARDS]
    found = last = 0
    for pp in offered:
        if pp == 0:
            break
        last = pp
        if pp * tp >= least:
            degrees[found] = pp
            found += 1
    if found == 0 and last:
        degrees[0] = last
        return 1
    return found
