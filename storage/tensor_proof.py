"""Proof of a file's tensors while it is written: their digests are compared as the bytes go by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from storage.errors import DeltaMismatchError
from storage.weights_hash import TensorEntry, start_digest

if TYPE_CHECKING:
    from hashlib import _Hash

_BLOCKS_IN_FLIGHT: Final = 4


class InBackground:
    """Calls a function with one thing after the other, in order, on a thread of its own; a few may wait."""

    def __init__(self, function: Callable[[memoryview], None]) -> None:
        """Keep the function; it is called on one other thread only."""
        self._function = function
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="proof")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> InBackground:
        """Begin."""
        return self

    def give(self, data: memoryview) -> None:
        """Add one; raises what an earlier one raised."""
        self._waiting.append(self._pool.submit(self._function, data))
        while len(self._waiting) > _BLOCKS_IN_FLIGHT:
            self._waiting.popleft().result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the rest and raise what it raised; after an error, give the rest up."""
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()


class TensorProof:
    """Compares the tensors of a file with their digests while its bytes go by in order."""

    def __init__(self, entries: Sequence[TensorEntry], digests: Mapping[str, str], name: str) -> None:
        """Begin before the first tensor.

        Args:
            entries: Tensors of the file, in the order of their bytes.
            digests: SHA-256 (hex) that each must have, by name.
            name: File name, for messages.
        """
        self._left = list(reversed(entries))
        self._digests, self._name = digests, name
        self._open: _Hash | None = None
        self._missing = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes.

        Raises:
            DeltaMismatchError: A tensor that ended in them is another one.
        """
        place = 0
        while place < len(data):
            if self._open is None:
                self._next()
                continue
            taken = data[place : place + self._missing]
            self._open.update(taken)
            self._missing -= len(taken)
            place += len(taken)
            self._close_full()

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            DeltaMismatchError: Tensors are missing.
        """
        while self._left and not self._left[-1].length:
            self._next()
            self._close_full()
        if self._left:
            raise DeltaMismatchError(f"{self._name} ends before its tensors do", key=self._name)

    def _next(self) -> None:
        self._open, self._missing = start_digest(self._left[-1]), self._left[-1].length
        self._close_full()

    def _close_full(self) -> None:
        if self._open is None or self._missing:
            return
        entry = self._left.pop()
        if self._open.hexdigest() != self._digests.get(entry.name):
            message = (
                f"{self._name}: tensor {entry.name} is not what the delta promises, so the base or the delta is not "
                "what it should be; take the full weights instead"
            )
            raise DeltaMismatchError(message, key=self._name)
        self._open = None
