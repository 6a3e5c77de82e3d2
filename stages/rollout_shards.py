"""Committed shards of an iteration, wherever they were made: each region's rollouts lie in its own store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage.errors import ObjectMissingError
from storage.layout import Split
from storage.manifest import Manifest
from storage.parquet_io import read_table
from storage.rollout_schema import COLUMNS, Family
from storage.rollouts import find_shard
from storage.store import Store

if TYPE_CHECKING:
    from stages.context import StageContext


@dataclass(frozen=True, slots=True)
class Shard:
    """One committed shard and the store that holds it."""

    store: Store
    """Store of the region where it was made."""
    manifest: Manifest
    """Its manifest."""

    def rows(self, family: Family, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return its rows as mappings, in the order of the file."""
        names = list(columns) if columns is not None else [column.name for column in COLUMNS[family]]
        tables = (read_table(self.store, part, family, names) for part in self.manifest.parts)
        return [row for table in tables for row in table.to_pylist()]


def region_stores(context: StageContext) -> list[Store]:
    """Return the stores of all regions, each once, the stage's own first."""
    roots = dict.fromkeys([context.request.root, *context.run.roots.values()])
    return [context.store_at(root) for root in roots]


def find_in_regions(
    context: StageContext,
    iteration: int,
    shard: int,
    family: Family,
    split: Split = Split.TRAIN,
    *,
    input_fingerprint: str | None = None,
) -> Shard | None:
    """Return a committed and complete shard of any region, None if there is none."""
    for store in region_stores(context):
        manifest = find_shard(
            store, context.run.name, iteration, shard, family=family, split=split, input_fingerprint=input_fingerprint
        )
        if manifest is not None:
            return Shard(store, manifest)
    return None


def all_shards(
    context: StageContext, iteration: int, num_shards: int, family: Family, split: Split = Split.TRAIN
) -> list[Shard]:
    """Return all shards of a family, in shard order.

    Raises:
        ObjectMissingError: some are not committed; all of them are named.
    """
    found = [find_in_regions(context, iteration, shard, family, split) for shard in range(num_shards)]
    missing = [str(index) for index, shard in enumerate(found) if shard is None]
    if missing:
        raise ObjectMissingError(
            f"run {context.run.name}, iteration {iteration}: shards {', '.join(missing)} of {num_shards} of family "
            f"{family.value} ({split.value}) are not committed in any region; repeat the stage that writes them."
        )
    return [shard for shard in found if shard is not None]


def iter_rows(shards: Sequence[Shard], family: Family, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of shards, one shard in memory at a time."""
    for shard in shards:
        yield from shard.rows(family, columns)
