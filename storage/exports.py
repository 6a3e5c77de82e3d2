"""Rollouts as plain files for other tools: hive-partitioned Parquet, JSON lines, or a folder for Hugging Face datasets.

Each file holds all shards of an iteration with its column families joined. The committed data stays as it is and stays
the authority; an export can be deleted and made again.

```
parquet   <target>/run=<run>/iteration=<k>/completions.parquet    run and iteration are in the path only
jsonl     <target>/<run>/<split>/iteration-<k>.jsonl              a JSON object per line, all columns
hf        <target>/<run>/README.md                                names the splits for `datasets.load_dataset`
          <target>/<run>/data/<split>/iteration-<k>.parquet       all columns of all families, in every file
```
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from storage.errors import ObjectMissingError
from storage.iterations import find_iterations
from storage.layout import Split, partition_folder, run_folder
from storage.parquet_io import encode_table
from storage.rollout_queries import json_value
from storage.rollout_schema import COLUMNS, Family, arrow_schema
from storage.rollouts import has_rollouts, read_rollouts
from storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

FILE_NAME: Final = "completions.parquet"
"""File of one iteration in a hive-partitioned export."""

_PARTITIONS: Final = ("run", "iteration")
_LINES_PER_BATCH: Final = 1024


class ExportFormat(StrEnum):
    """What an export is made for."""

    PARQUET = "parquet"
    """Query engines: hive-partitioned Parquet."""
    JSONL = "jsonl"
    """Anything that reads text: JSON lines."""
    HF = "hf"
    """Hugging Face datasets: `datasets.load_dataset(<target>/<run>)`."""


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
    form: ExportFormat = ExportFormat.PARQUET,
    redact: Callable[[pa.Table], pa.Table] | None = None,
) -> list[ExportedIteration]:
    """Write the rows of a run, a file for each iteration; memory holds one iteration.

    Families that an iteration lacks read as null where other files have them.

    Args:
        store: Store of the run.
        run: Run name.
        target: Root of the export; a file that is there is replaced, at once and wholly.
        split: Train or eval.
        iterations: Which; default all with rollouts of the split.
        form: What is written.
        redact: What may be seen of a table (`stages.redaction`); None writes everything.

    Raises:
        ObjectMissingError: The run has no rollouts of the split, or a shard of one that was asked for is missing.
        CorruptObjectError: A file breaks its contract.
    """
    found = find_iterations(store, run) if iterations is None else iterations
    wanted = [k for k in found if iterations is not None or has_rollouts(store, run, k, split=split)]
    if not wanted:
        message = f"{store.url}/{run_folder(run)} has no committed rollouts of split {split.value} to export"
        raise ObjectMissingError(message, key=run_folder(run))
    done = []
    for iteration in wanted:
        families, table = _read(store, run, iteration, split)
        table = table if redact is None else redact(table)
        key, content = _WRITERS[form](run, split, iteration, table)
        target.publish(key, content)
        done.append(ExportedIteration(iteration, key, table.num_rows, families))
    if form is ExportFormat.HF:
        _write_card(target, run)
    return done


def partition_key(run: str, iteration: int, file_name: str) -> str:
    """Return the key of an iteration's file in a hive-partitioned folder."""
    return f"{partition_folder(run, iteration)}/{file_name}"


def _read(store: Store, run: str, iteration: int, split: Split) -> tuple[tuple[Family, ...], pa.Table]:
    families = tuple(
        family
        for family in Family
        if family is not Family.ROLLOUTS and has_rollouts(store, run, iteration, family, split)
    )
    return families, read_rollouts(store, run, iteration, families=families, split=split, is_complete=False)


def _hive(run: str, split: Split, iteration: int, table: pa.Table) -> tuple[str, bytes]:
    del split  # in the rows
    return partition_key(run, iteration, FILE_NAME), encode_table(table.drop_columns(list(_PARTITIONS)))


def _json_lines(run: str, split: Split, iteration: int, table: pa.Table) -> tuple[str, bytes]:
    maps = _map_columns(table.schema)
    lines = []
    for batch in table.to_batches(_LINES_PER_BATCH):
        for row in batch.to_pylist():
            fixed = {name: dict(row[name]) for name in maps if row[name] is not None}
            lines.append(json.dumps(json_value(row | fixed), ensure_ascii=False, separators=(",", ":")))
    text = "".join(f"{line}\n" for line in lines)
    return f"{run_folder(run)}/{split.value}/iteration-{iteration:06d}.jsonl", text.encode()


def _hugging_face(run: str, split: Split, iteration: int, table: pa.Table) -> tuple[str, bytes]:
    key = f"{run_folder(run)}/data/{split.value}/iteration-{iteration:06d}.parquet"
    return key, encode_table(_with_lists_for_maps(_with_all_columns(table)))


_WRITERS: Final[dict[ExportFormat, Callable[[str, Split, int, Any], tuple[str, bytes]]]] = {
    ExportFormat.PARQUET: _hive,
    ExportFormat.JSONL: _json_lines,
    ExportFormat.HF: _hugging_face,
}


def _map_columns(schema: pa.Schema) -> list[str]:
    import pyarrow as pa

    return [field.name for field in schema if pa.types.is_map(field.type)]


def _with_all_columns(table: pa.Table) -> pa.Table:
    """Return the table with the columns of every family, in one order: the files of a dataset must have one schema."""
    import pyarrow as pa

    fields = {field.name: field for family in Family for field in arrow_schema(family)}
    names = dict.fromkeys(column.name for family in Family for column in COLUMNS[family])
    columns = [
        table.column(name) if name in table.column_names else pa.nulls(table.num_rows, fields[name].type)
        for name in names
    ]
    schema = pa.schema([fields[name].with_nullable(True).remove_metadata() for name in names])
    return pa.table(columns, schema=schema)


def _with_lists_for_maps(table: pa.Table) -> pa.Table:
    """Return the table with lists of `key` and `value` in place of maps, which Hugging Face datasets does not have."""
    import pyarrow as pa

    for name in _map_columns(table.schema):
        index = table.schema.get_field_index(name)
        kind = table.schema.field(name).type
        pairs = pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
        values = [
            None if parts is None else [{"key": key, "value": value} for key, value in parts]
            for parts in table.column(name).to_pylist()
        ]
        table = table.set_column(index, pa.field(name, pairs), pa.array(values, pairs))
    return table


def _write_card(target: Store, run: str) -> None:
    """Write the dataset card, whose head names the files of each split that was exported."""
    folder = run_folder(run)
    there = {info.key.split("/")[2] for info in target.list(f"{folder}/data") if info.key.endswith(".parquet")}
    splits = [split.value for split in Split if split.value in there]
    files = "".join(f"  - split: {split}\n    path: data/{split}/*.parquet\n" for split in splits)
    card = (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n\n# Rollouts of {run}\n\n"
        "Completions of a reinforcement-learning run, one row each; column `iteration` is the RL iteration (split "
        "`eval`: the policy version that was evaluated).\n"
    )
    target.publish(f"{folder}/README.md", card.encode())
