"""Parts of compiled functions are compiled once, into whatever calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

from plans.cost.compiled.jit import borrowed, inner


@inner
def largest(values: Any) -> Any:
    found = values[0]
    for value in values:
        found = max(found, value)
    return found


@inner
def spread(values: Any) -> Any:
    return largest(values) - values.min()


@njit
def both(values: Any) -> Any:
    return spread(values) + largest(values)


@njit
def lent(values: Any) -> Any:
    return largest(borrowed(values))


VALUES = np.array([3.0, -1.0, 8.5])


def test_parts_of_parts_and_what_numba_brings_are_linked() -> None:
    assert both(VALUES) == 9.5 + 8.5
    assert both(np.array([2, 7])) == 5 + 7


def test_python_cannot_call_a_part() -> None:
    assert both(VALUES) == 18.0
    with pytest.raises(KeyError, match="largest is a part of compiled functions; Python cannot call it"):
        largest(VALUES)


def test_read_only_arrays_need_no_parts_of_their_own() -> None:
    kept, read_only = VALUES.copy(), VALUES.copy()
    read_only.setflags(write=False)
    assert lent(kept) == 8.5
    count = len(largest.signatures)
    assert lent(read_only) == 8.5
    assert len(largest.signatures) == count
