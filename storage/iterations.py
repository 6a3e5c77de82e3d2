"""Which iterations of a run have something committed, found by probing keys, never by listing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from storage.errors import ObjectMissingError
from storage.layout import Split, iteration_record
from storage.manifest import Manifest
from storage.rollout_schema import Family
from storage.rollouts import has_rollouts, shard_manifests
from storage.runs import IterationRecord, load_run, read_iteration
from storage.store import Store

MAX_GAP = 8
"""Iterations without any object after which the search ends; asynchronous runs are ahead by their staleness."""

NUM_READERS = 8
"""Threads that look up small objects at once; on object stores each look-up is a round trip."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def find_iterations(store: Store, run: str, *, max_gap: int = MAX_GAP) -> list[int]:
    """Return the iterations that have a record or rollouts of either split, ascending.

    Args:
        store: Where.
        run: Run name.
        max_gap: Consecutive iterations without objects after which the search ends (>= 1).
    """
    found: list[int] = []
    start = first = _first_iteration(store, run)
    while True:
        block = range(start, start + max(NUM_READERS, max_gap))
        hits = _parallel(lambda k: _has_objects(store, run, k), block)
        found += [iteration for iteration, is_hit in zip(block, hits, strict=True) if is_hit]
        start = block.stop
        if start - 1 - (found[-1] if found else first - 1) >= max_gap:
            return found


def _first_iteration(store: Store, run: str) -> int:
    """Return where a run begins: at 0, unless it is a fork; 0 also without a run record."""
    try:
        return int(load_run(store, run).metadata.get("first_iteration", 0))
    except ObjectMissingError:
        return 0


def find_records(store: Store, run: str) -> list[IterationRecord]:
    """Return the records of all reported iterations, ascending."""
    return records_of(store, run, find_iterations(store, run))


def records_of(store: Store, run: str, iterations: Iterable[int]) -> list[IterationRecord]:
    """Return the records of those iterations that are reported, in the order asked for."""
    records = _parallel(lambda k: _record(store, run, k), iterations)
    return [record for record in records if record is not None]


def find_shards(
    store: Store, run: str, family: Family | str, split: Split | str, iterations: Iterable[int]
) -> list[Manifest]:
    """Return the manifests of all committed shards of a family; iterations whose shards are incomplete are left out."""
    groups = _parallel(lambda k: _shards(store, run, k, family, split), iterations)
    return [manifest for group in groups for manifest in group]


def _has_objects(store: Store, run: str, iteration: int) -> bool:
    return store.exists(iteration_record(run, iteration)) or any(
        has_rollouts(store, run, iteration, split=split) for split in Split
    )


def _record(store: Store, run: str, iteration: int) -> IterationRecord | None:
    try:
        return read_iteration(store, run, iteration)
    except ObjectMissingError:
        return None


def _shards(store: Store, run: str, iteration: int, family: Family | str, split: Split | str) -> list[Manifest]:
    try:
        return shard_manifests(store, run, iteration, family, split)
    except ObjectMissingError:
        return []


def _parallel(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(function, items))
