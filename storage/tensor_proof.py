"""Proof of a file's tensors while its bytes go by: BLAKE3 of each one, compared with what a delta promises.

SHA-256 (``storage.weights_hash``) names a version; BLAKE3 proves a delta's result, since it is as strong and takes a
third of the time, which is most of what applying a delta costs (docs/adr/0012).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from storage.errors import DeltaMismatchError
from storage.weights_hash import TensorEntry, digest_head

if TYPE_CHECKING:
    import blake3


class TensorProofs:
    """BLAKE3 (hex) of each tensor of a file, over type, shape and bytes, from its bytes in order."""

    def __init__(self, entries: Sequence[TensorEntry], name: str, promised: Mapping[str, str] | None = None) -> None:
        """Begin before the first tensor.

        Args:
            entries: Tensors of the file, in the order of their bytes.
            name: File name, for messages.
            promised: What each must be; ``None``: they are only found.
        """
        self._left = list(reversed(entries))
        self._name, self._promised = name, promised
        self._open: blake3.blake3 | None = None
        self._missing = 0
        self.found: dict[str, str] = {}
        """By tensor name, of those that have gone by."""

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
        if self._left:
            raise DeltaMismatchError(f"{self._name} ends before its tensors do", key=self._name)

    def _next(self) -> None:
        from blake3 import blake3

        self._open, self._missing = blake3(digest_head(self._left[-1])), self._left[-1].length
        self._close_full()

    def _close_full(self) -> None:
        if self._open is None or self._missing:
            return
        entry, proof = self._left.pop(), self._open.hexdigest()
        if self._promised is not None and proof != self._promised.get(entry.name):
            message = (
                f"{self._name}: tensor {entry.name} is not what the delta promises, so the base or the delta is not "
                "what it should be; take the full weights instead"
            )
            raise DeltaMismatchError(message, key=self._name)
        self.found[entry.name] = proof
        self._open = None
