"""Rollouts as plain Parquet for other engines: one file per iteration, hive-partitioned by run and iteration.

``<target>/run=<run>/iteration=<k>/completions.parquet`` holds all shards of an iteration with its column families
joined: what was written as many small files becomes one with bounded row groups. The committed data stays as it is and
stays the authority; an export can be deleted and made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from storage.errors import ObjectMissingError
from storage.iterations import find_iterations
from storage.layout import Split, run_folder
from storage.parquet_io import encode_table
from storage.rollout_schema import Family
from storage.rollouts import has_rollouts, read_rollouts
from storage.store import Store

FILE_NAME: Final = "completions.parquet"
"""File of one iteration."""

_PARTITIONS: Final = ("run", "iteration")


@dataclass(frozen=True, slots=True)
class ExportedIteration:
    """One file of an export."""

    iteration: int
    """RL iteration (split eval: policy version evaluated)."""
    key: str
    """Key in the target."""
    rows: int
    """Rows in it."""
    families: tuple[Family, ...]
    """Column families that were joined."""


def export_rollouts(
    store: Store,
    run: str,
    target: Store,
    *,
    split: Split = Split.TRAIN,
    iterations: Sequence[int] | None = None,
) -> list[ExportedIteration]:
    """Write the rows of a run into a hive-partitioned folder; memory holds one iteration.

    The partition columns are in the path only, where every engine expects them. Families that an iteration lacks read
    as null where other files have them.

    Args:
        store: Store of the run.
        run: Run name.
        target: Root of the export; a file that is there is replaced, at once and wholly.
        split: Train or eval.
        iterations: Which; default all with rollouts of the split.

    Raises:
        ObjectMissingError: The run has no rollouts of the split, or a shard of one that was asked for is missing.
        CorruptObjectError: A file breaks its contract.
    """
    found = find_iterations(store, run) if iterations is None else iterations
    wanted = [k for k in found if iterations is not None or has_rollouts(store, run, k, split=split)]
    if not wanted:
        message = f"{store.url}/{run_folder(run)} has no committed rollouts of split {split.value} to export"
        raise ObjectMissingError(message, key=run_folder(run))
    return [_export(store, run, target, split, k) for k in wanted]


def partition_key(run: str, iteration: int, file_name: str) -> str:
    """Return the key of an iteration's file in a hive-partitioned folder."""
    return f"run={run_folder(run)}/iteration={iteration}/{file_name}"


def _export(store: Store, run: str, target: Store, split: Split, iteration: int) -> ExportedIteration:
    families = tuple(
        family
        for family in Family
        if family is not Family.ROLLOUTS and has_rollouts(store, run, iteration, family, split)
    )
    table = read_rollouts(store, run, iteration, families=families, split=split, is_complete=False)
    key = partition_key(run, iteration, FILE_NAME)
    target.publish(key, encode_table(table.drop_columns(list(_PARTITIONS))))
    return ExportedIteration(iteration, key, table.num_rows, families)
