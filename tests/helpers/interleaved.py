"""Runs several pieces of work on one store in an interleaving that the test chooses, call by call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from storage.ranged_reads import open_ranges
from storage.store import ObjectInfo, Store

Work = Callable[[Store], None]


@dataclass
class _Worker:
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    paused: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_done: bool = False
    error: BaseException | None = None


class SteppedStore:
    """A store whose every call waits until the scheduler lets this worker go on."""

    def __init__(self, store: Store, worker: _Worker) -> None:
        self._store = store
        self._worker = worker

    def _turn(self) -> None:
        self._worker.paused.release()
        self._worker.go.acquire()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def has_conditional_create(self) -> bool:
        return self._store.has_conditional_create

    def read_bytes(self, key: str) -> bytes:
        self._turn()
        return self._store.read_bytes(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self._turn()
        return self._store.read_range(key, start, length)

    def size(self, key: str) -> int | None:
        self._turn()
        return self._store.size(key)

    def exists(self, key: str) -> bool:
        self._turn()
        return self._store.exists(key)

    def publish(self, key: str, data: bytes) -> None:
        self._turn()
        self._store.publish(key, data)

    def publish_file(self, key: str, path: Path) -> None:
        self._turn()
        self._store.publish_file(key, path)

    def create(self, key: str, data: bytes) -> bool:
        self._turn()
        return self._store.create(key, data)

    def download(self, key: str, path: Path) -> None:
        self._turn()
        self._store.download(key, path)

    def open_input(self, key: str) -> BinaryIO:
        return open_ranges(self, key)

    def delete(self, key: str) -> bool:
        self._turn()
        return self._store.delete(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._turn()
        yield from [*self._store.list(prefix)]

    def local_path(self, key: str) -> Path | None:
        return None


def run_interleaved(store: Store, works: Sequence[Work], choices: Sequence[int]) -> None:
    """Run all works to their end; choice n says which of the unfinished ones makes the n-th store call.

    When the choices are used up the works go on in turn. The first error of any work is raised at the end.
    """
    workers = [_Worker() for _ in works]
    threads = [
        threading.Thread(target=_run, args=(work, worker, SteppedStore(store, worker)), daemon=True)
        for work, worker in zip(works, workers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for worker in workers:
        worker.paused.acquire()
    step = 0
    while live := [worker for worker in workers if not worker.is_done]:
        choice = choices[step] if step < len(choices) else step
        worker = live[choice % len(live)]
        worker.go.release()
        worker.paused.acquire()
        step += 1
    for thread in threads:
        thread.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error


def _run(work: Work, worker: _Worker, store: SteppedStore) -> None:
    try:
        work(store)
    except BaseException as error:  # noqa: BLE001 - handed over to the test
        worker.error = error
    finally:
        worker.is_done = True
        worker.paused.release()
