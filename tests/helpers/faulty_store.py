"""A store wrapper for tests that fails, truncates, doubles, reorders, interleaves or dies at the n-th call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from storage.errors import StorageError, TransientStorageError
from storage.ranged_reads import open_ranges
from storage.store import ObjectInfo, Store

Result = TypeVar("Result")


class Crash(BaseException):
    """Death of the process: no ``except Exception`` of the code under test may catch it."""


class Fault(StrEnum):
    """What happens at the chosen call."""

    FAIL = "fail"
    """A transient error before anything is done."""
    FAIL_AFTER = "fail_after"
    """The call takes effect, its answer is lost."""
    CRASH = "crash"
    """The process dies before the call takes effect."""
    CRASH_AFTER = "crash_after"
    """The process dies after the call took effect."""
    TRUNCATE = "truncate"
    """A store without atomic writes: half of the bytes are left, then the process dies (reads: die)."""
    DUPLICATE = "duplicate"
    """The call takes effect twice (a client repeated a request whose answer was slow)."""
    REORDER = "reorder"
    """A listing comes in another order, and without the object written last (eventual listings); others: as FAIL."""
    SHORT = "short"
    """A read gives half of the bytes; others: as FAIL."""
    INTERLEAVE = "interleave"
    """Somebody else does something (``between``), or time passes, just before the call."""


_ANSWERS = {Fault.REORDER: ("list",), Fault.SHORT: ("read_bytes", "read_range")}


class FaultyStore:
    """Counts the calls to another store and lets one of them (or several in a row) go wrong."""

    def __init__(
        self,
        store: Store,
        at: int | None = None,
        fault: Fault = Fault.CRASH,
        times: int = 1,
        between: Callable[[], object] | None = None,
    ) -> None:
        """Wrap a store.

        Args:
            store: The store that works.
            at: Number of the first call that goes wrong, from 0; ``None`` = none does.
            fault: What happens there.
            times: How many calls in a row go wrong.
            between: What somebody else does, for ``Fault.INTERLEAVE``.
        """
        self._store = store
        self._bad = range(0) if at is None else range(at, at + times)
        self._fault = fault
        self._between = between
        self.calls: list[tuple[str, str]] = []

    def _call(
        self, name: str, key: str, action: Callable[[], Result], half: Callable[[], object] | None = None
    ) -> Result:
        number = len(self.calls)
        self.calls.append((name, key))
        if number not in self._bad:
            return action()
        if self._fault in (Fault.DUPLICATE, Fault.INTERLEAVE):
            with suppress(StorageError):
                (self._between or action)()
            return action()
        if self._fault in (Fault.REORDER, Fault.SHORT) and half is not None and name in _ANSWERS[self._fault]:
            return cast("Result", half())
        if self._fault in (Fault.FAIL, Fault.REORDER, Fault.SHORT):
            raise TransientStorageError(f"planned failure of {name} {key}", key=key)
        if self._fault is Fault.CRASH:
            raise Crash(f"{name} {key}")
        if self._fault is Fault.TRUNCATE:
            if half is not None and name in ("publish", "publish_file", "create"):
                half()
            raise Crash(f"{name} {key}")
        with suppress(StorageError):  # the answer is lost, be it good or bad
            action()
        if self._fault is Fault.FAIL_AFTER:
            raise TransientStorageError(f"planned lost answer of {name} {key}", key=key)
        raise Crash(f"after {name} {key}")

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def has_conditional_create(self) -> bool:
        return self._store.has_conditional_create

    def read_bytes(self, key: str) -> bytes:
        return self._call("read_bytes", key, lambda: self._store.read_bytes(key), lambda: self._half(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._call(
            "read_range",
            key,
            lambda: self._store.read_range(key, start, length),
            lambda: self._store.read_range(key, start, length // 2),
        )

    def size(self, key: str) -> int | None:
        return self._call("size", key, lambda: self._store.size(key))

    def exists(self, key: str) -> bool:
        return self._call("exists", key, lambda: self._store.exists(key))

    def publish(self, key: str, data: bytes) -> None:
        half = data[: len(data) // 2]
        self._call("publish", key, lambda: self._store.publish(key, data), lambda: self._store.publish(key, half))

    def publish_file(self, key: str, path: Path) -> None:
        data = path.read_bytes()
        half = data[: len(data) // 2]
        self._call("publish_file", key, lambda: self._store.publish(key, data), lambda: self._store.publish(key, half))

    def create(self, key: str, data: bytes) -> bool:
        half = data[: len(data) // 2]
        return self._call("create", key, lambda: self._store.create(key, data), lambda: self._store.create(key, half))

    def download(self, key: str, path: Path) -> None:
        self._call("download", key, lambda: self._store.download(key, path))

    def open_input(self, key: str) -> BinaryIO:
        return open_ranges(self, key)

    def delete(self, key: str) -> bool:
        return self._call("delete", key, lambda: self._store.delete(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from self._call("list", prefix, lambda: [*self._store.list(prefix)], lambda: self._other_order(prefix))

    def _half(self, key: str) -> bytes:
        data = self._store.read_bytes(key)
        return data[: len(data) // 2]

    def _other_order(self, prefix: str) -> list[ObjectInfo]:
        written = [key for name, key in self.calls if name in ("publish", "publish_file", "create")]
        return [info for info in reversed([*self._store.list(prefix)]) if info.key not in written[-1:]]

    def local_path(self, key: str) -> Path | None:
        return None
