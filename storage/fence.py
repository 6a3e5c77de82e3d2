"""One of several attempts at an artefact may publish, on stores that cannot decide that themselves.

Where a store has no conditional create, "look, then publish" lets two attempts replace each other's manifest within
an instant. Reads and writes alone cannot decide between attempts of which one may stop at any moment (that is known),
but with a bound on how long a living one takes between two requests they can: Lamport's splitter for the usual case
(at most one attempt passes it, and without waiting), Fischer's delay for the rest.

- Claim, then look whether the door is open, close it, and look whether the claim is still one's own: who finds both
  (no other one can) publishes at once.
- Everybody else waits for that manifest. When none has come in :data:`WAIT_S`, the one publishes whose claim has stood
  all that time.

An attempt that sleeps longer than :data:`WAIT_S` between its last look and its publish can still come second; whichever
manifest stands then is whole, since data objects have keys of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from storage.errors import ObjectMissingError
from storage.layout import data_key
from storage.store import Store

WAIT_S = 10.0
"""Longest time that a living attempt takes from its claim to its manifest, a few small requests."""

POLL_S = 0.2
"""Seconds between two looks."""

ATTEMPT: Final = "fence"
"""Attempt under which the fence's objects lie, so that what a dead attempt left is collected with its data."""

now: Callable[[], float] = time.monotonic
"""Clock, seconds; replaced by tests."""

sleep: Callable[[float], None] = time.sleep
"""Waits that many seconds; replaced by tests."""


def may_publish(store: Store, folder: str, token: str, is_settled: Callable[[], bool]) -> bool:
    """Return whether this attempt is the one to publish a folder's manifest; ``False``: another one has.

    Whoever may publish calls :func:`leave` afterwards.

    Args:
        store: Store without conditional create.
        folder: Artefact folder.
        token: Token of this attempt.
        is_settled: Whether a manifest that stands decides the matter.
    """
    claim, door = _keys(folder)
    store.publish(claim, token.encode())
    if not store.exists(door):
        store.publish(door, token.encode())
        if _read(store, claim) == token:
            return not is_settled()
    before: str | None = None
    while not _settles(is_settled):
        holder = _read(store, claim)
        if holder == token:
            return not is_settled()
        if holder == before:  # its attempt is dead
            store.publish(claim, token.encode())
        before = holder
    return False


def leave(store: Store, folder: str) -> None:
    """Open the door again once the manifest stands."""
    for key in reversed(_keys(folder)):
        store.delete(key)


def _settles(is_settled: Callable[[], bool]) -> bool:
    """Wait for somebody else's manifest."""
    deadline = now() + WAIT_S
    while not is_settled():
        if now() >= deadline:
            return False
        sleep(POLL_S)
    return True


def _keys(folder: str) -> tuple[str, str]:
    return data_key(folder, ATTEMPT, "claim"), data_key(folder, ATTEMPT, "door")


def _read(store: Store, key: str) -> str | None:
    try:
        return store.read_bytes(key).decode(errors="replace")
    except ObjectMissingError:
        return None
