"""One function over many things on several threads, results in the order of the things, few of them under way at once.

For work that releases the interpreter (reading files, numpy, zstd, hashing) while whoever takes the results does what
needs their order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, Self, TypeVar

Thing = TypeVar("Thing")
Result = TypeVar("Result")

MAX_THREADS: Final = 8
"""Threads beyond which the order is what takes time."""


class InOrder(Generic[Thing, Result]):
    """Calls ``function(thing, slot)`` on threads, one for each processor that this process may use.

    Args:
        function: What to do. No two calls that run, or whose results are still in use, have the same slot, so a slot
            can stand for memory that is used again.
    """

    def __init__(self, function: Callable[[Thing, int], Result]) -> None:
        """Keep the function; threads begin with the first thing."""
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._function = function
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="in-order")
        self.num_slots: Final = threads + 1
        """Slots are 0 to this, exclusive."""

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def results(self, things: Iterable[Thing]) -> Iterator[Result]:
        """Yield what the function returned, in the order of the things, or raise what it raised.

        A result and its slot are in use until the next one is asked for.
        """
        waiting = deque[Future[Result]]()
        for number, thing in enumerate(things):
            if len(waiting) == self.num_slots:
                yield waiting.popleft().result()
            waiting.append(self._pool.submit(self._function, thing, number % self.num_slots))
        while waiting:
            yield waiting.popleft().result()

    def __exit__(self, *_: object) -> None:
        """Give up what has not begun and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)
