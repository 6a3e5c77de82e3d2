"""Upload of a large file in parts, several at a time: a part that fails is repeated alone, memory holds few.

Nothing of an upload is visible before its end; one that fails is abandoned, so the store keeps no parts of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, TypeVar, runtime_checkable

from storage.errors import CorruptObjectError, StorageError, StoreAccessError

Result = TypeVar("Result")

PART_BYTES: Final = 16 << 20
"""Bytes of a part; files of up to twice as many are written at once."""

PARTS_IN_FLIGHT: Final = 8
"""Parts that are on their way together: 128 MiB of memory."""

_MAX_PARTS: Final = 10_000
"""Most parts that S3 takes of one object."""


class Repeater(Protocol):
    """Calls a function with its arguments, again where that may help."""

    def __call__(self, function: Callable[..., Result], /, *arguments: object) -> Result:
        """Return what the function returns."""
        ...


@runtime_checkable
class MultipartStore(Protocol):
    """A store that takes an object in parts."""

    def size(self, key: str) -> int | None:
        """See :class:`storage.store.Store`."""
        ...

    def publish(self, key: str, data: bytes) -> None:
        """See :class:`storage.store.Store`."""
        ...

    def begin_upload(self, key: str) -> str:
        """Return the store's name for a new upload of an object."""
        ...

    def upload_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        """Write part ``number`` (from 1) of an upload; return the store's tag of it. May be repeated."""
        ...

    def finish_upload(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Make the parts, in order, the object's content."""
        ...

    def abandon_upload(self, key: str, upload: str) -> None:
        """Throw the parts away."""
        ...


def call_once(function: Callable[..., Result], /, *arguments: object) -> Result:
    """Call a function; no :class:`Repeater` stands behind it."""
    return function(*arguments)


def upload_file(store: MultipartStore, key: str, path: Path, call: Repeater = call_once) -> None:
    """Make a local file an object's content.

    Args:
        store: Where to.
        key: Object key.
        path: The file, which nobody changes meanwhile.
        call: Makes every single request.

    Raises:
        CorruptObjectError: The file was cut shorter meanwhile.
        StorageError: As the store's ``publish``.
    """
    size = path.stat().st_size
    if size <= 2 * PART_BYTES:
        call(store.publish, key, path.read_bytes())
        return
    upload = call(store.begin_upload, key)
    try:
        tags = _upload_parts(store, key, upload, path, size, call)
        _finish(store, key, upload, tags, size, call)
    except BaseException:
        with suppress(StorageError):  # the failure before is the one to tell
            store.abandon_upload(key, upload)
        raise


def _upload_parts(store: MultipartStore, key: str, upload: str, path: Path, size: int, call: Repeater) -> list[str]:
    tags, running = dict[int, str](), dict[Future[str], int]()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(PARTS_IN_FLIGHT, "upload") as pool:
        try:
            for number, (start, length) in enumerate(_spans(size), 1):
                data = os.pread(file.fileno(), length, start)
                if len(data) != length:
                    message = f"{path} ends at byte {start + len(data)}, but had {size} bytes when its upload began"
                    raise CorruptObjectError(message, key=key)
                running[pool.submit(call, store.upload_part, key, upload, number, data)] = number
                if len(running) >= PARTS_IN_FLIGHT:
                    _collect(running, tags)
            while running:
                _collect(running, tags)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # none may be written once the upload is abandoned
    return [tags[number] for number in sorted(tags)]


def _spans(size: int) -> Iterator[tuple[int, int]]:
    length = max(PART_BYTES, -(-size // _MAX_PARTS))
    for start in range(0, size, length):
        yield start, min(length, size - start)


def _collect(running: dict[Future[str], int], tags: dict[int, str]) -> None:
    ended, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in ended:
        tags[running.pop(future)] = future.result()


def _finish(store: MultipartStore, key: str, upload: str, tags: Sequence[str], size: int, call: Repeater) -> None:
    """End an upload; a try whose answer was lost is recognised by the object that it made."""
    tries = 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        try:
            store.finish_upload(key, upload, tags)
        except StoreAccessError:
            if tries == 1 or store.size(key) != size:
                raise

    call(attempt)
