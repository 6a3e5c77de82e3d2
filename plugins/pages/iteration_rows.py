"""The rows of iterations as the pages ask for them: what a committed iteration has is looked up once and kept.

Committed iterations never change, so their manifests are kept, and so is what lists filter and sort by (`listed` of
`storage.sql`): another filter, order or page of the same iteration then reads nothing but the texts that it shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from cachetools import LRUCache

from plugins.pages.faults import PageError
from plugins.pages.run_source import PageRun
from storage.errors import ObjectMissingError
from storage.layout import Split
from storage.sql import LISTED, VIEWS, Shards, connect_shards, shards_of

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

MAX_SHARDS: Final = 20_000
"""Manifests that are kept, a few kilobytes each."""

MAX_LISTED_BYTES: Final = 256 << 20
"""Size of the lists that are kept: about a hundred bytes for a completion."""

_REPEATED: Final = ("prompt_id", "split", "finish_reason", "region", "machine", "reward_status", "dropped_reason")
"""Texts of which many rows have the same."""

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by key for several threads, up to a size; those that were not asked for longest go first."""

    def __init__(self, max_size: int, size_of: Callable[[Value], int]) -> None:
        """Keep nothing yet."""
        self._values: LRUCache[Hashable, Value] = LRUCache(max_size, getsizeof=size_of)
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        """Return a value that is kept."""
        with self._lock:
            return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value in the place of others; one that is too large by itself is not kept."""
        with self._lock:
            self._values.pop(key, None)
            if self._values.getsizeof(value) <= self._values.maxsize:
                self._values[key] = value

    def drop(self, key: Hashable) -> None:
        """Keep a value no longer."""
        with self._lock:
            self._values.pop(key, None)


class IterationRows:
    """Opens the rows of iterations, and keeps what does not change of them."""

    def __init__(self, max_shards: int = MAX_SHARDS, max_listed_bytes: int = MAX_LISTED_BYTES) -> None:
        """Keep nothing yet."""
        self._shards: Kept[Shards] = Kept(max_shards, lambda shards: sum(map(len, shards.values())) + 1)
        self._listed: Kept[pa.Table] = Kept(max_listed_bytes, lambda table: int(table.nbytes))

    @contextmanager
    def opened(
        self, run: PageRun, split: Split, *iterations: int, is_listed: bool = True
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a connection with the rows of some iterations; it can reach no file of its own.

        Args:
            run: The run.
            split: Train or eval.
            iterations: RL iterations (split eval: policy versions).
            is_listed: Whether there is a view `listed` of the first of them.

        Raises:
            PageError: DuckDB could not answer; says why.
            ObjectMissingError: A file that a manifest names is gone.
        """
        import duckdb

        connection = self._connected(run, split, iterations)
        try:
            # One request must not take the whole API server: what is asked for is one page.
            connection.execute("SET threads = 2; SET memory_limit = '2GB'; SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            if is_listed:
                connection.register("listed", self._listed_of(connection, run, split, iterations[0]))
            yield connection
        except duckdb.Error as error:
            what = str(error).splitlines()[0]
            message = f"The rollouts of run {run.name} can't be read: {what}; `motley verify {run.name}` says more."
            raise PageError(message, HTTPStatus.INTERNAL_SERVER_ERROR) from error
        finally:
            connection.close()

    def _connected(self, run: PageRun, split: Split, iterations: Sequence[int]) -> duckdb.DuckDBPyConnection:
        try:
            return connect_shards(run.rows_store, self._shards_of(run, split, iterations))
        except ObjectMissingError:  # what is kept may have been made anew since, after a loss
            for iteration in iterations:
                self._shards.drop(_place(run, split, iteration))
            return connect_shards(run.rows_store, self._shards_of(run, split, iterations))

    def _shards_of(self, run: PageRun, split: Split, iterations: Sequence[int]) -> Shards:
        found = [self._shards_of_one(run, split, iteration) for iteration in dict.fromkeys(iterations)]
        return {family: [shard for shards in found for shard in shards[family]] for family in VIEWS}

    def _shards_of_one(self, run: PageRun, split: Split, iteration: int) -> Shards:
        place = _place(run, split, iteration)
        if (kept := self._shards.get(place)) is not None:
            return kept
        shards = shards_of(run.rows_store, run.name, [iteration], [split])
        if split is Split.TRAIN and iteration < run.done:  # evaluations follow the commit of what they evaluate
            self._shards.put(place, shards)
        return shards

    def _listed_of(self, connection: duckdb.DuckDBPyConnection, run: PageRun, split: Split, iteration: int) -> pa.Table:
        shards = self._shards_of_one(run, split, iteration)
        made_from = (run.rows_store.url, *((shard.key, shard.attempt) for found in shards.values() for shard in found))
        table = self._listed.get(made_from)
        if table is None:
            table = connection.sql(f"{LISTED} WHERE iteration = {iteration:d}").to_arrow_table()
            for name in _REPEATED:
                column = table.column(name).combine_chunks().dictionary_encode()
                table = table.set_column(table.column_names.index(name), name, column)
            self._listed.put(made_from, table)
        return table


def _place(run: PageRun, split: Split, iteration: int) -> Hashable:
    """Return under what an iteration's manifests are kept: a rewind makes it anew, as does another run of that name."""
    lineage = 0 if run.head is None else len(run.head.rollbacks)
    return run.rows_store.url, run.name, run.record.created_at, lineage, split, iteration
