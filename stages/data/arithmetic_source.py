"""Built-in source `arithmetic:<op>`: two 2-digit numbers, result of fixed width; small enough to learn in minutes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from stages.data.source import RawRow
from stages.data.spec import DataSpec
from stages.errors import DataError

_OPERATIONS: Final[Mapping[str, tuple[str, Callable[[int, int], int]]]] = {
    "addition": ("+", lambda a, b: a + b),
    "multiplication": ("*", lambda a, b: a * b),
}
_DIGITS: Final = 2


def arithmetic_rows(spec: DataSpec, operation: str) -> Iterator[RawRow]:
    """All 10,000 problems `ab+cd=` with their 3-digit (products: 4-digit) results, or `spec.size` of them.

    A chosen `size` takes the first ones of an order by hash with `spec.seed`, so that a small dataset covers all
    numbers.

    Raises:
        DataError: The operation is unknown, or `size` is larger than the number of problems.
    """
    if operation not in _OPERATIONS:
        raise DataError(f"data.source arithmetic:{operation}: known operations are {', '.join(_OPERATIONS)}")
    symbol, apply = _OPERATIONS[operation]
    span = 10**_DIGITS
    num_problems = span * span
    size = num_problems if spec.size is None else spec.size
    if size > num_problems:
        raise DataError(f"data.size is {size}, but arithmetic:{operation} has {num_problems} problems")
    width = len(str(apply(span - 1, span - 1)))
    by_hash = sorted(range(num_problems), key=lambda index: hashlib.sha256(f"{spec.seed} {index}".encode()).digest())
    for index in sorted(by_hash[:size]):
        a, b = divmod(index, span)
        problem = f"{a:0{_DIGITS}d}{symbol}{b:0{_DIGITS}d}="
        yield RawRow(example=problem, prompt=problem, answer=f"{apply(a, b):0{width}d}", metadata={})
