"""Compiled functions read named tuples by address, and see what Python sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

from plans.cost.compiled.tables import FloatMatrix, FloatVector, HashMatrix, IntVector
from plans.cost.compiled.words import reader_of, words_of


class Small(NamedTuple):
    counts: IntVector
    size: int


class Large(NamedTuple):
    rates: FloatMatrix
    small: Small
    hashes: HashMatrix
    limit: int
    lengths: FloatVector


large_at = reader_of(Large)


@njit
def looked_up(words: Any, row: int, column: int) -> Any:
    large = large_at(words)
    rates, shape = large.rates[row, column] + large.rates[row].sum(), large.rates.shape
    return (
        rates,
        shape,
        large.small.counts[-1],
        large.small.size,
        large.hashes[column, 1],
        large.limit,
        len(large.lengths),
    )


@njit
def write(words: Any, value: float) -> None:
    large_at(words).lengths[1] = value


def large(**changes: Any) -> Large:
    hashes = np.arange(6, dtype=np.uint64).reshape(3, 2) + np.uint64(2**63)
    values = Large(np.arange(6.0).reshape(2, 3), Small(np.array([4, 5]), 7), hashes, -3, np.zeros(4))
    return values._replace(**changes)


def test_fields_are_those_of_the_tuple() -> None:
    values = large()
    expected = (values.rates[1, 2] + 12.0, (2, 3), 5, 7, int(values.hashes[2, 1]), -3, 4)
    assert looked_up(words_of(values), 1, 2) == expected


def test_what_compiled_code_writes_is_in_the_array() -> None:
    values = large()
    write(words_of(values), 2.5)
    assert values.lengths.tolist() == [0.0, 2.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("field", "array", "message"),
    [
        ("rates", np.zeros((2, 3), dtype=np.float32), "rates: float32 with 2 dimensions"),
        ("rates", np.zeros((2, 3), dtype=np.int64), "rates: int64"),
        ("rates", np.zeros(3), "rates: float64 with 1 dimensions"),
        ("rates", np.zeros((3, 2)).T, "one after the other"),
        ("lengths", np.zeros(8)[::2], "one after the other"),
    ],
)
def test_other_arrays_than_declared_are_refused(field: str, array: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        words_of(large(**{field: array}))
