"""What keeps the engines of a gang in step: none of them begins a call before all are about to begin the same one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from stages.engines.training.rank_place import RankPlace
from stages.engines.training.rank_store import join_store
from stages.errors import DeadlineError, EngineError, EngineUnavailableError


class GangCalls:
    """The calls of one engine, seen by the others through the ranks' store."""

    def __init__(self, place: RankPlace, machines: Sequence[str], machine: str) -> None:
        """Connect: with a connection of its own, since the ranks' one is busy while they meet.

        Args:
            place: The first rank's place.
            machines: Machines of the gang.
            machine: This engine's.

        Raises:
            EngineError: An engine of this machine was in the gang before: the others know that one's ranks.
        """
        self._store = join_store(place)
        self._others = [name for name in machines if name != machine]
        self._lead, self._machine, self._timeout_s = machines[0], machine, place.timeout_s
        self._count = 0
        if self._store.add(f"engine/{machine}", 1) > 1:
            raise EngineError(
                f"{machine} had another engine in training gang {place.token}, which has ended; a gang takes no second "
                "one, its stages start again together",
                gang=place.token,
            )

    def agree(self, method: str, arguments: Sequence[Any]) -> None:
        """Wait until the engines of all machines are about to make this call.

        Raises:
            EngineError: Another engine makes another call.
            DeadlineError: One makes none in time; it is named.
            EngineUnavailableError: The store is gone, and with it the engine of the first machine.
        """
        self._count += 1
        mine = _described(method, arguments)
        ends_at = time.monotonic() + self._timeout_s
        try:
            self._store.set(self._key(self._machine), mine)
            for other in self._others:
                self._compare(other, mine, ends_at)
        except dist.DistNetworkError as error:
            reason = str(error).partition("\n")[0]
            raise EngineUnavailableError(
                f"the engine of {self._lead}, the first machine of the training gang, is gone ({reason})",
                machine=self._lead,
            ) from error

    def _compare(self, other: str, mine: str, ends_at: float) -> None:
        try:
            self._store.wait([self._key(other)], timedelta(seconds=max(ends_at - time.monotonic(), 0.001)))
        except dist.DistStoreError as error:
            raise DeadlineError(
                f"the engine of {other} did not come to call {self._count} of the training gang ({mine}) within "
                f"{self._timeout_s:.0f} s; look at the training stage and the engine's log on {other}",
                machine=other,
            ) from error
        theirs = self._store.get(self._key(other)).decode()
        if theirs != mine:
            raise EngineError(
                f"call {self._count} of the training gang is {mine} on {self._machine} and {theirs} on {other}: the "
                "stages of the two machines are not at the same point; they start again together",
                machine=other,
            )

    def _key(self, machine: str) -> str:
        return f"call/{self._count}/{machine}"


def _described(method: str, arguments: Sequence[Any]) -> str:
    """Name a call by what is the same on all machines: no paths, and of rows their number."""
    facts = [argument for argument in arguments if isinstance(argument, int)]
    facts += [len(argument) for argument in arguments if isinstance(argument, list)]
    return f"{method}({', '.join(map(str, facts))})"
