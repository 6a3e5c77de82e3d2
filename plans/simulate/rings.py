"""The order of the GPUs in a gradient ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

#: Steps after which the search for an order without forbidden links gives up.
SEARCH_STEPS = 20_000
#: GPUs of a ring above which no order is sought (the search's depth is that of the recursion).
MOST_SOUGHT = 400


def ring_order(gpus: Sequence[int], can_send: Callable[[int, int], bool]) -> list[int]:
    """Return the GPUs by index, as ranks are numbered; where that needs a forbidden link, an order that needs none.

    By index again where no order was found (or sought, in huge rings): the transfer then says which link is forbidden.

    Args:
        gpus: GPU indices, each once.
        can_send: whether one GPU may send to another; symmetric.
    """
    plain = sorted(gpus)
    if len(plain) > MOST_SOUGHT or all(can_send(a, b) for a, b in pairwise([*plain, plain[0]])):
        return plain
    return _Search(plain, can_send).run() or plain


class _Search:
    """Depth-first search for a closed walk over all GPUs, lowest index first."""

    def __init__(self, gpus: list[int], can_send: Callable[[int, int], bool]) -> None:
        # From the GPU with the fewest neighbours: its two places are nearly forced.
        self._near = {a: [b for b in gpus if b != a and can_send(a, b)] for a in gpus}
        self._path = [min(gpus, key=lambda gpu: (len(self._near[gpu]), gpu))]
        self._left = set(gpus) - {self._path[0]}
        self._steps = 0

    def run(self) -> list[int] | None:
        return self._path if self._extend() else None

    def _extend(self) -> bool:
        self._steps += 1
        if not self._left:
            return self._path[0] in self._near[self._path[-1]]
        for gpu in sorted(self._left.intersection(self._near[self._path[-1]]), key=lambda g: (len(self._near[g]), g)):
            if self._steps > SEARCH_STEPS:
                return False
            self._path.append(gpu)
            self._left.discard(gpu)
            if self._extend():
                return True
            self._left.add(self._path.pop())
        return False
