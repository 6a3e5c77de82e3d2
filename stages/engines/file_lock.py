"""Locks on files of this machine, held by an open file: the kernel frees them when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stages.errors import DeadlineError, EngineUnavailableError

_POLL_S = 0.05


def hold_exclusively(path: Path, what: str) -> BinaryIO:
    """Lock a file until the returned object is closed or this process ends.

    Raises:
        EngineUnavailableError: Another process holds it; its pid is named.
    """
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = read_holder(path)
        file.close()
        raise EngineUnavailableError(f"{what} is already running (pid {holder})", holder=holder) from error
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


@contextmanager
def exclusive(path: Path, deadline: float, what: str) -> Iterator[None]:
    """Hold a lock for the duration of a block, waiting for it until `deadline` (of `time.monotonic`).

    Raises:
        DeadlineError: The deadline passed first; the holder is named.
    """
    while True:
        try:
            file = hold_exclusively(path, what)
        except EngineUnavailableError as error:
            if time.monotonic() >= deadline:
                holder = read_holder(path)
                raise DeadlineError(
                    f"{what} is held by pid {holder}, which did not finish in time", holder=holder
                ) from error
            time.sleep(_POLL_S)
        else:
            break
    with file:
        yield


def read_holder(path: Path) -> str:
    """Return the pid that a lock file names, as text; `unknown` if it names none."""
    try:
        return path.read_text().strip() or "unknown"
    except OSError:
        return "unknown"
