"""How the functions of this package become machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from plans.errors import SearchError

try:
    from numba import njit
except ImportError as error:
    raise SearchError("searching needs numba, which is not installed; install motley[planner].") from error

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def compiled(function: FunctionT) -> FunctionT:
    """Return the function as machine code, made at its first call and kept beside the source for later processes.

    Where neither the folder of the source nor the user's cache folder can be written, every process compiles anew.
    """
    try:
        return cast("FunctionT", njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # numba found no folder for its cache
        return cast("FunctionT", njit(error_model="numpy")(function))
