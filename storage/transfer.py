"""Objects over slow links: parallel ranged reads into a local file, which go on where they were cut.

A read of one range is one request, so as many are kept in flight as the link's delay times its bandwidth wants, and
memory holds just those. Finished ranges are journalled beside the file: after a cut (a killed process, a lost link,
a deadline) the next call reads only what is missing. The end is always the comparison of length and SHA-256 with the
manifest. Repeating a failed request is not done here but in ``storage.retry``.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from storage.arriving import arriving_folder
from storage.errors import CorruptObjectError, TransferDeadlineError
from storage.manifest import Part, corrupt_part, sha256_of_file
from storage.ranged_reads import read_exactly
from storage.store import Store

RANGE_BYTES: Final = 4 << 20
"""Bytes of one ranged read; what a cut can lose of each one in flight."""

NUM_READERS: Final = 8
"""Ranged reads in flight: 32 MiB, twice what 1 Gbps at 60 ms each way holds."""

_ENTRY_BYTES: Final = 8


class RateLimiter:
    """Lets bytes through at a mean rate, for all transfers of one link together."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start with an idle link.

        Args:
            bytes_per_s: Mean rate (> 0).
            now: Monotonic clock, seconds; injected by tests.
            sleep: Waits that many seconds.
        """
        self._bytes_per_s, self._now, self._sleep = bytes_per_s, now, sleep
        self._lock = threading.Lock()
        self._free_at = now()

    def take(self, num_bytes: int) -> None:
        """Wait until the link has room for that many bytes."""
        with self._lock:
            start = max(self._now(), self._free_at)
            self._free_at = start + num_bytes / self._bytes_per_s
        if (delay := start - self._now()) > 0:
            self._sleep(delay)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """How a link between this machine and a store is used."""

    num_readers: int = NUM_READERS
    """Ranged reads in flight (>= 1)."""
    range_bytes: int = RANGE_BYTES
    """Bytes of one read (>= 1)."""
    limiter: RateLimiter | None = None
    """Rate limit, shared by all transfers over the link; ``None`` = none."""
    ends_at: float | None = None
    """Deadline by ``now``, seconds; ``None`` = none."""
    now: Callable[[], float] = field(default=time.monotonic)
    """Monotonic clock, seconds; injected by tests."""


def fetch_part(store: Store, part: Part, path: Path, link: Link | None = None) -> int:
    """Write a part of an artefact to a local file; go on where an earlier call was cut.

    Args:
        store: Where from.
        part: The part; its length and SHA-256 are what must arrive.
        path: Local file; appears complete and proved, or not at all.
        link: How the link is used.

    Returns:
        Bytes read from the store by this call.

    Raises:
        ObjectMissingError: The object is gone.
        CorruptObjectError: The object is shorter, or other bytes arrived; nothing of them is kept.
        TransferDeadlineError: The deadline passed; names the peer and how far it got. What arrived is kept.
        TransientStorageError: The store failed even when asked again; what arrived is kept.
    """
    used = link or Link()
    with arriving_folder(path) as folder:
        partial, journal = folder / "partial", folder / "journal"
        done = _finished(journal, partial, part, used)
        try:
            read = _read_missing(store, part, folder, done, used)
        except CorruptObjectError:
            shutil.rmtree(folder)
            if not done:
                raise
        else:
            partial.replace(path)
            shutil.rmtree(folder)
            return read
    # Bytes of the earlier call may be the bad ones: once more, from the start.
    return fetch_part(store, part, path, link)


def _read_missing(store: Store, part: Part, folder: Path, done: set[int], link: Link) -> int:
    partial, journal = folder / "partial", folder / "journal"
    missing = [start for start in range(0, part.size, link.range_bytes) if start not in done]
    read = _read_all(store, part, partial, journal, missing, link)
    size, sha256 = sha256_of_file(partial)
    if (size, sha256) != (part.size, part.sha256):
        raise corrupt_part(store, part, size, sha256)
    return read


def _finished(journal: Path, partial: Path, part: Part, link: Link) -> set[int]:
    """Return the starts of the ranges that an earlier call finished; begin a journal if there is none for this part."""
    head = f"{part.sha256} {part.size} {link.range_bytes}\n".encode()
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        data = b""
    if data.startswith(head) and partial.is_file():
        entries = data[len(head) :]
        whole = len(entries) // _ENTRY_BYTES * _ENTRY_BYTES
        return {int.from_bytes(entries[at : at + _ENTRY_BYTES], "little") for at in range(0, whole, _ENTRY_BYTES)}
    partial.unlink(missing_ok=True)
    journal.write_bytes(head)
    partial.touch()
    return set()


def _read_all(store: Store, part: Part, partial: Path, journal: Path, missing: list[int], link: Link) -> int:
    """Read the missing ranges, a bounded number at a time, and journal each one once its bytes are in the file."""
    waiting, running, read = list(reversed(missing)), dict[Future[int], int](), 0
    pool = ThreadPoolExecutor(link.num_readers, thread_name_prefix="transfer")
    try:
        with journal.open("ab", buffering=0) as finished:
            while waiting or running:
                while waiting and len(running) < link.num_readers:
                    start = waiting.pop()
                    running[pool.submit(_read_range, store, part, partial, start, link)] = start
                ended, _ = wait(running, timeout=_seconds_left(store, part, read, link), return_when=FIRST_COMPLETED)
                for future in ended:
                    start = running.pop(future)
                    read += future.result()
                    finished.write(start.to_bytes(_ENTRY_BYTES, "little"))
    finally:
        # A read that hangs must not hold up whoever was told of it.
        pool.shutdown(wait=False, cancel_futures=True)
    return read


def _read_range(store: Store, part: Part, partial: Path, start: int, link: Link) -> int:
    length = min(link.range_bytes, part.size - start)
    if link.limiter is not None:
        link.limiter.take(length)
    data = read_exactly(store, part.path, start, length)
    with partial.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, start)
    return length


def _seconds_left(store: Store, part: Part, read: int, link: Link) -> float | None:
    if link.ends_at is None:
        return None
    left = link.ends_at - link.now()
    if left <= 0:
        message = (
            f"reading {store.url}/{part.path} took too long: {read} of {part.size} bytes arrived before the deadline; "
            "look at the link to that store, or raise limits.stage_deadline_s; the next try goes on from there"
        )
        raise TransferDeadlineError(message, key=part.path)
    return left
