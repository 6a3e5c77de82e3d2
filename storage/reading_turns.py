"""Whose turn it is to read new weights from a region's store: few machines at once, the more urgent ones first.

Each machine has one document, which only it writes; it is there while the machine waits or reads. Nobody decides: a
machine goes ahead once fewer than ``at_once`` others read or wait before it in the order. That is a courtesy for the
store's sake, not a lock: two that look at the same moment may both go, a machine that says nothing is not waited for,
and what a dead one said ends by itself. So no turn can hold up a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from storage.documents import model_bytes, read_model
from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import reader_turn
from storage.store import Store

READER_FORMAT: Final = "motley.reader/1"
POLL_S: Final = 0.5
"""Seconds between two looks at the others."""
WAITING_COUNTS_S: Final = 15.0
"""Seconds for which a machine that waits is believed to live after it last said so."""


class Reader(BaseModel):
    """What one machine says of its reading."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.reader/1"] = "motley.reader/1"
    """Kind and version of this document."""
    machine: str
    """The machine."""
    state: Literal["waiting", "reading"]
    """Whether it reads already."""
    expires_at: AwareDatetime
    """When it counts no more, UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingTurns:
    """The turns of one region as one of its machines sees them."""

    store: Store
    """The region's store."""
    run: str
    """Run name."""
    machine: str
    """This machine."""
    order: Sequence[str]
    """All machines that may read, most urgent first; this one is among them."""
    at_once: int
    """Most machines that read at the same time (>= 1)."""
    reading_counts_s: float
    """Seconds after which a read counts no more, however it goes on."""
    now: Callable[[], float] = field(default=time.time)
    """Unix time, seconds."""
    sleep: Callable[[float], None] = field(default=time.sleep)
    """Waits so many seconds."""

    @contextmanager
    def turn(self, left_s: Callable[[], float]) -> Iterator[None]:
        """Wait for this machine's turn, and hold it for the body.

        Args:
            left_s: Seconds that may still be waited; raises when there are none.
        """
        try:
            while not self._is_next():
                left_s()
                self.sleep(POLL_S)
            yield
        finally:
            self.store.delete(reader_turn(self.run, self.machine))

    def _is_next(self) -> bool:
        """Say that this machine waits, look at the others, and say that it reads if it may."""
        self._say("waiting", WAITING_COUNTS_S)
        place, now = self.order.index(self.machine), datetime.fromtimestamp(self.now(), UTC)
        ahead = 0
        for other, machine in enumerate(self.order):
            reader = None if machine == self.machine else self._read(machine)
            if reader is not None and reader.expires_at > now:
                ahead += reader.state == "reading" or other < place
        if ahead >= self.at_once:
            return False
        self._say("reading", self.reading_counts_s)
        return True

    def _say(self, state: Literal["waiting", "reading"], counts_s: float) -> None:
        expires_at = datetime.fromtimestamp(self.now(), UTC) + timedelta(seconds=counts_s)
        key = reader_turn(self.run, self.machine)
        self.store.publish(key, model_bytes(Reader(machine=self.machine, state=state, expires_at=expires_at), key))

    def _read(self, machine: str) -> Reader | None:
        """Return what another machine says; what cannot be read holds nobody up."""
        try:
            return read_model(self.store, reader_turn(self.run, machine), Reader, READER_FORMAT)
        except (ObjectMissingError, CorruptObjectError):
            return None
