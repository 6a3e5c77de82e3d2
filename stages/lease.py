"""The lease of a stage process: what it reads and writes stays while it works (see `storage.leases`).

A stage that is killed cannot give its lease back. It holds a file lock on this machine for as long as it lives; the
next stage of the run on the machine finds the lock free and gives the lease back in its place.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from stages.engines.file_lock import hold_exclusively
from stages.errors import EngineUnavailableError
from storage.errors import ObjectMissingError
from storage.leases import release_lease, take_lease
from storage.names import escape_name
from storage.store import Store

KEPT_FOR_GOOD: Final = 0
"""Version of policy and critic that no lease need name: retention never drops it."""

_LOOK_S: Final = 10.0
"""Seconds that another stage may take to find out that a lock's holder is dead."""


class StageLease:
    """What one attempt at a stage holds."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        holder: str,
        attempt: str,
        iterations: Iterable[int],
        folder: Path,
        ends_at: float,
    ) -> None:
        """Describe a lease; nothing is taken yet.

        Args:
            store: Store of the home region.
            run: Run name.
            holder: Stage, machine and iteration, in words.
            attempt: Attempt under which the stage writes.
            iterations: Iterations whose rollouts, and versions whose evaluations, the stage may read.
            folder: Local folder for the lock files of the run's stages on this machine.
            ends_at: When the lease ends by itself, Unix time.
        """
        self._store = store
        self._run = run
        self._holder = escape_name(f"{holder}-{attempt}")
        self._attempt = attempt
        self._iterations = tuple(iterations)
        self._path = folder / f"{self._holder}.lock"
        self._expires_at = datetime.fromtimestamp(ends_at, UTC)
        self._policies: set[int] = set()
        self._checkpoints: set[int] = set()
        self._critics: set[int] = set()
        self._lock: BinaryIO | None = None

    def take(self) -> None:
        """Take the lease, and give back those of stages of the run that died on this machine."""
        if self._lock is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._path)
        for path in sorted(self._path.parent.glob("*.lock")):
            if path != self._path:
                self._bury(path)
        self._publish()

    def hold(
        self, *, policies: Iterable[int] = (), checkpoints: Iterable[int] = (), critics: Iterable[int] = ()
    ) -> None:
        """Also hold policy versions, resume points and critics.

        Raises:
            ObjectMissingError: One is not committed, or about to be deleted.
        """
        before = self._policies, self._checkpoints, self._critics
        wanted = (
            self._policies | (set(policies) - {KEPT_FOR_GOOD}),
            self._checkpoints | set(checkpoints),
            self._critics | (set(critics) - {KEPT_FOR_GOOD}),
        )
        if wanted == before:
            return
        self.take()
        self._policies, self._checkpoints, self._critics = wanted
        try:
            self._publish()
        except ObjectMissingError:
            self._policies, self._checkpoints, self._critics = before
            self._publish()
            raise

    def release(self) -> None:
        """Give everything back."""
        if self._lock is None:
            return
        release_lease(self._store, self._run, self._holder)
        self._path.unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    def _publish(self) -> None:
        take_lease(
            self._store,
            self._run,
            self._holder,
            expires_at=self._expires_at,
            policy_versions=self._policies,
            checkpoint_versions=self._checkpoints,
            critic_versions=self._critics,
            iterations=self._iterations,
            attempts=(self._attempt,),
        )

    def _bury(self, path: Path) -> None:
        """Give back the lease of a holder that is dead: its lock is free."""
        try:
            file = path.open("rb")
        except FileNotFoundError:  # its holder ended meanwhile
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            release_lease(self._store, self._run, path.name.removesuffix(".lock"))
            path.unlink(missing_ok=True)


def _locked(path: Path) -> BinaryIO:
    """Lock the attempt's own file; another stage may be looking at it, or bury it before it is locked.

    Raises:
        EngineUnavailableError: A live process works under the same attempt.
    """
    ends_at = time.monotonic() + _LOOK_S
    while True:
        try:
            file = hold_exclusively(path, f"attempt {path.stem}")
        except EngineUnavailableError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.01)
            continue
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()
