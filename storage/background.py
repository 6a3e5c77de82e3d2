"""Work on a second thread beside what the first one does: hashing releases the interpreter, so both go on at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, Self, TypeVar

Thing = TypeVar("Thing")

BLOCKS_IN_FLIGHT: Final = 2
"""Blocks that may wait for the other thread; whoever gives more has that many and two more buffers."""


class InBackground(Generic[Thing]):
    """Calls a function with one thing after the other, in order, on a thread of its own; a few may wait."""

    def __init__(self, function: Callable[[Thing], None]) -> None:
        """Keep the function; it is called on one other thread only."""
        self._function = function
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def give(self, thing: Thing) -> None:
        """Add one, to stay as it is until as many more were given as may wait; raises what an earlier one raised."""
        self._waiting.append(self._pool.submit(self._function, thing))
        while len(self._waiting) > BLOCKS_IN_FLIGHT:
            self._waiting.popleft().result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the rest and raise what it raised; after an error, give the rest up."""
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()
