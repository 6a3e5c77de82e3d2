"""Plain loops over arrays, where numpy has a function or an expression.

The numbers are the same, but numba compiles a good deal of code for each of those, for each kind of array.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from plans.cost.compiled.jit import inner
from plans.cost.compiled.tables import FloatArray, IntArray

ArrayT = TypeVar("ArrayT", FloatArray, IntArray)


@inner
def fill(values: ArrayT, value: float) -> None:
    """Write one value everywhere."""
    for index in range(len(values)):
        values[index] = value


@inner
def copy_to(target: ArrayT, source: ArrayT) -> None:
    """Write the elements of another array of the same length."""
    for index in range(len(source)):
        target[index] = source[index]


@inner
def are_equal(first: IntArray, second: IntArray) -> bool:
    """Tell whether two arrays of the same length are equal."""
    for index in range(len(first)):
        if first[index] != second[index]:
            return False
    return True


@inner
def largest_at(values: FloatArray) -> int:
    """Return where the largest of some values is; the first among equals."""
    best = 0
    for index in range(1, len(values)):
        if values[index] > values[best]:
            best = index
    return best


@inner
def largest_of(values: FloatArray) -> float:
    """Return the largest of some values."""
    return values[largest_at(values)]


@inner
def least_of(values: IntArray) -> int:
    """Return the least of some values."""
    found = values[0]
    for value in values:
        found = min(found, value)
    return found


@inner
def non_zero(counts: IntArray) -> IntArray:
    """Return where counts are not 0, ascending."""
    places, found = np.empty(len(counts), dtype=np.int64), 0
    for index in range(len(counts)):
        if counts[index]:
            places[found] = index
            found += 1
    return places[:found]
