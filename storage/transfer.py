"""Objects over slow links: parallel ranged reads into a local file, which go on where they were cut.

A read of one range is one request, so as many are kept in flight as the link's delay times its bandwidth wants, and
memory holds just those. Finished ranges are journalled beside the file: after a cut (a killed process, a lost link,
a deadline) the next call reads only what is missing. The end is always the comparison of length and SHA-256 with the
manifest; what is complete from the beginning on is hashed while the rest arrives. Repeating a failed request is not
done here but in ``storage.retry``, a rate limit is a store's (``storage.rate_limit``).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from storage.arriving import arriving_folder
from storage.background import InBackground
from storage.errors import CorruptObjectError, TransferDeadlineError
from storage.foreign_errors import on_this_machine
from storage.manifest import Part, corrupt_part, sha256_of_file
from storage.ranged_reads import read_exactly
from storage.store import Store

RANGE_BYTES: Final = 4 << 20
"""Bytes of one ranged read; what a cut can lose of each one in flight."""

NUM_READERS: Final = 16
"""Ranged reads in flight: 64 MiB. With 8 a seventh of a link of 1 Gbps at 60 ms each way stayed unused
(`benchmarks/storage/link_use_s3`)."""

_ENTRY_BYTES: Final = 8

Arrived = Callable[[Path, int], None]
"""Told the file that a part arrives in, which has its full length, and how many bytes from its beginning on are in it;
fewer than before when all is read anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """How a link between this machine and a store is used."""

    num_readers: int = NUM_READERS
    """Ranged reads in flight (>= 1)."""
    range_bytes: int = RANGE_BYTES
    """Bytes of one read (>= 1)."""
    ends_at: float | None = None
    """Deadline by ``now``, seconds; ``None`` = none."""
    now: Callable[[], float] = field(default=time.monotonic)
    """Monotonic clock, seconds; injected by tests."""


def download_part(store: Store, part: Part, path: Path, link: Link | None = None) -> None:
    """Write a part to a local file and compare length and SHA-256 with its manifest.

    Raises:
        ObjectMissingError: The object is gone.
        CorruptObjectError: Other bytes.
        TransferDeadlineError: The link's deadline passed.
    """
    if store.local_path(part.path) is None:
        fetch_part(store, part, path, link)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unproved = path.with_name(f"{path.name}.unproved")
    try:
        store.download(part.path, unproved)
        found = sha256_of_file(unproved)
        if found == (part.size, part.sha256):
            unproved.replace(path)
            return
    finally:
        unproved.unlink(missing_ok=True)
    raise corrupt_part(store, part, *found)


def fetch_part(store: Store, part: Part, path: Path, link: Link | None = None, arrived: Arrived | None = None) -> int:
    """Write a part of an artefact to a local file; go on where an earlier call was cut.

    Args:
        store: Where from.
        part: The part; its length and SHA-256 are what must arrive.
        path: Local file; appears complete and proved, or not at all.
        link: How the link is used.
        arrived: Told how much has arrived, from the beginning on.

    Returns:
        Bytes read from the store by this call.

    Raises:
        ObjectMissingError: The object is gone.
        CorruptObjectError: The object is shorter, or other bytes arrived; nothing of them is kept.
        TransferDeadlineError: The deadline passed; names the peer and how far it got. What arrived is kept.
        StoreFullError: This machine's disk is full; what arrived is kept.
        TransientStorageError: The store failed even when asked again; what arrived is kept.
    """
    used = link or Link()
    with on_this_machine(path), arriving_folder(path) as folder:
        partial, journal = folder / "partial", folder / "journal"
        done = _finished(journal, partial, part, used)
        try:
            read = _read_missing(store, part, folder, done, used, arrived or _told)
        except CorruptObjectError:
            shutil.rmtree(folder)
            if not done:
                raise
        else:
            partial.replace(path)
            shutil.rmtree(folder)
            return read
    # Bytes of the earlier call may be the bad ones: once more, from the start.
    return fetch_part(store, part, path, link, arrived)


def _read_missing(store: Store, part: Part, folder: Path, done: set[int], link: Link, arrived: Arrived) -> int:
    partial, journal = folder / "partial", folder / "journal"
    digest = hashlib.sha256()

    def hash_span(span: tuple[int, int]) -> None:
        """Hash a span of the file; one that somebody has cut shorter gives another digest, which is found."""
        start, length = span
        digest.update(os.pread(file.fileno(), length, start))

    with partial.open("rb", buffering=0) as file, InBackground(hash_span) as hashing:
        prefix = _Prefix(part.size, link.range_bytes, {*done}, hashing, lambda here: arrived(partial, here))
        prefix.grow()
        read = _read_all(store, part, partial, journal, prefix, link)
    size, sha256 = partial.stat().st_size, digest.hexdigest()
    if (size, sha256) != (part.size, part.sha256):
        raise corrupt_part(store, part, size, sha256)
    return read


def _told(_: Path, __: int) -> None:
    """Nobody waits for the beginning of the file."""


class _Prefix:
    """Which ranges of a file have arrived; what is complete from its beginning on goes to be hashed."""

    def __init__(
        self,
        size: int,
        range_bytes: int,
        done: set[int],
        hashing: InBackground[tuple[int, int]],
        tell: Callable[[int], None],
    ) -> None:
        self._size, self._range_bytes, self._done, self._hashing, self._tell = size, range_bytes, done, hashing, tell
        self._end = 0

    def missing(self) -> list[int]:
        """Return the starts of the ranges that have not arrived."""
        return [start for start in range(0, self._size, self._range_bytes) if start not in self._done]

    def add(self, start: int) -> None:
        """Note that a range lies in the file."""
        self._done.add(start)
        self.grow()

    def grow(self) -> None:
        """Hand over what is complete now, and tell how much that is."""
        while self._end < self._size and self._end in self._done:
            length = min(self._range_bytes, self._size - self._end)
            self._hashing.give((self._end, length))
            self._end += length
        self._tell(self._end)


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
        os.truncate(partial, part.size)
        return {int.from_bytes(entries[at : at + _ENTRY_BYTES], "little") for at in range(0, whole, _ENTRY_BYTES)}
    partial.unlink(missing_ok=True)
    journal.write_bytes(head)
    partial.touch()
    os.truncate(partial, part.size)
    return set()


def _read_all(store: Store, part: Part, partial: Path, journal: Path, prefix: _Prefix, link: Link) -> int:
    """Read the missing ranges, a bounded number at a time, and journal each one once its bytes are in the file."""
    waiting, running, read = list(reversed(prefix.missing())), dict[Future[int], int](), 0
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
                    prefix.add(start)
    finally:
        # A read that hangs must not hold up whoever was told of it.
        pool.shutdown(wait=False, cancel_futures=True)
    return read


def _read_range(store: Store, part: Part, partial: Path, start: int, link: Link) -> int:
    length = min(link.range_bytes, part.size - start)
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
