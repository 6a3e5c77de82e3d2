"""Parquet bytes of rollout tables: bounded row groups, page checksums, additive schema on reading."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import Buffer

from storage.errors import CorruptObjectError, ObjectMissingError, SchemaVersionError
from storage.foreign_errors import translated
from storage.manifest import Part
from storage.ranged_reads import open_ranges
from storage.rollout_schema import COLUMNS, SCHEMA_VERSION, Family, arrow_schema
from storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROW_GROUP_BYTES = 16 << 20
"""Aimed size of a row group in memory: what a reader of one group holds at once."""

MAX_ROW_GROUP_ROWS = 8192
"""Most rows in a row group."""


_DISTINCT = frozenset(
    {"row_id", "prompt_text", "completion_text", "prompt_token_ids", "completion_token_ids", "sampler_logprobs", "seed"}
    | {"reference_logprobs", "values", "advantage", "reward_s", "parsed_answer"}
)
"""Columns whose values hardly ever repeat."""


def encode_table(table: pa.Table) -> bytes:
    """Return the table as Parquet; equal tables give equal bytes under one version of pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    per_row = max(1, table.nbytes // max(1, table.num_rows))
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, min(MAX_ROW_GROUP_ROWS, ROW_GROUP_BYTES // per_row)),
        compression="zstd",
        # A dictionary of values that hardly ever repeat is built only to be thrown away.
        use_dictionary=[name for name in table.column_names if name not in _DISTINCT],
        write_page_checksum=True,
    )
    return bytes(sink.getvalue().to_pybytes())


def decode_table(data: bytes, where: str) -> pa.Table:
    """Return the table that `encode_table` made.

    Args:
        data: Content of the file.
        where: What it is, for the message.

    Raises:
        CorruptObjectError: It is no whole Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        message = f"{where} is no complete Parquet file ({error}); make it again"
        raise CorruptObjectError(message) from error


def sorted_table(table: pa.Table, order: Sequence[str]) -> pa.Table:
    """Return the table sorted by columns, ascending; itself if it is sorted already."""
    import numpy as np

    if table.num_rows < 2:
        return table
    ranks = [table.column(name).combine_chunks() for name in order]
    if all(not column.null_count for column in ranks):
        keys = [np.asarray(column.to_numpy(zero_copy_only=False)) for column in ranks]
        is_after = np.zeros(table.num_rows - 1, bool)
        is_equal = np.ones(table.num_rows - 1, bool)
        for key in keys:
            is_after |= is_equal & (key[1:] < key[:-1])
            is_equal &= key[1:] == key[:-1]
        if not is_after.any():
            return table
    return table.sort_by([(name, "ascending") for name in order])


def content_digest(table: pa.Table, family: Family) -> str:
    """Return the SHA-256 (hex) of a table without its provenance columns."""
    import pyarrow as pa

    names = [column.name for column in COLUMNS[family] if not column.is_provenance]
    content = table.select(names).replace_schema_metadata(None).combine_chunks()
    digest = hashlib.sha256()
    with pa.PythonFile(_DigestSink(digest), "w") as sink, pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content)
    return digest.hexdigest()


class _DigestSink(io.RawIOBase):
    """A file that only hashes what is written to it."""

    def __init__(self, digest: hashlib._Hash) -> None:
        super().__init__()
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        return len(view)


def read_table(store: Store, part: Part, family: Family, columns: Sequence[str]) -> pa.Table:
    """Read columns of one Parquet part, as the current schema has them.

    Optional columns that an older file lacks become null.

    Args:
        store: Where from.
        part: Data object, from a manifest.
        family: Family that the object belongs to.
        columns: Names to read, all of the family.

    Raises:
        ObjectMissingError: The object is gone.
        CorruptObjectError: Torn, of another size or row count, checksum wrong, a required column missing or of
            another type, or null in a required column; names file and column.
        SchemaVersionError: Written by newer code.
    """
    import pyarrow as pa

    schema = arrow_schema(family)
    with open_parquet(store, part) as file:
        _check_version(store, part, family, file.schema_arrow)
        present = _column_names(store, part, file)
        for column in COLUMNS[family]:
            if column.is_required and column.since == 1 and column.name not in present:
                raise _column_error(store, part, column.name, "is required but missing")
        wanted = [name for name in columns if name in present]
        try:
            table = file.read(columns=wanted)
        except (pa.ArrowException, OSError, ValueError) as error:
            message = f"{store.url}/{part.path}: rows cannot be read ({error}); run `motley verify`"
            raise CorruptObjectError(message, key=part.path) from error
    arrays = [_conformed(store, part, table, schema.field(name)) for name in columns]
    return pa.table(arrays, schema=pa.schema([schema.field(name) for name in columns]))


def open_parquet(store: Store, part: Part) -> pq.ParquetFile:
    """Open a Parquet part after comparing its size, footer and row count with the manifest (P1, P2).

    Raises:
        ObjectMissingError: The object is gone.
        CorruptObjectError: Another size, no footer, or another row count.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = store.size(part.path)
    if size is None:
        message = f"{store.url}/{part.path} is missing although its manifest names it; run `motley verify`"
        raise ObjectMissingError(message, key=part.path)
    if size != part.size:
        message = f"{store.url}/{part.path} has {size} bytes, its manifest says {part.size}; repeat the stage"
        raise CorruptObjectError(message, key=part.path)
    path = store.local_path(part.path)
    with translated(store.url, part.path, "read"):
        # Arrow's own file, not Python's, where there is one: columns are then read and decoded on several threads.
        source = open_ranges(store, part.path, size=size) if path is None else pa.OSFile(str(path), "rb")
    try:
        file = pq.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        source.close()
        message = f"{store.url}/{part.path} is no complete Parquet file ({error}); repeat the stage that wrote it"
        raise CorruptObjectError(message, key=part.path) from error
    if file.metadata.num_rows != part.rows:
        found = file.metadata.num_rows
        file.close(force=True)
        message = f"{store.url}/{part.path} has {found} rows, its manifest says {part.rows}; repeat the stage"
        raise CorruptObjectError(message, key=part.path)
    return file


def _column_names(store: Store, part: Part, file: pq.ParquetFile) -> list[str]:
    try:
        return [str(name) for name in file.schema_arrow.names]
    except ValueError as error:  # a damaged footer may hold names that are no text
        message = f"{store.url}/{part.path}: column names cannot be read ({error}); run `motley verify`"
        raise CorruptObjectError(message, key=part.path) from error


def _check_version(store: Store, part: Part, family: Family, schema: pa.Schema) -> None:
    text = (schema.metadata or {}).get(b"motley.schema", b"").decode(errors="replace")
    name, _, version = text.rpartition("/")
    if name != family.value or not version.isdecimal():
        message = f"{store.url}/{part.path} holds schema {text!r}, but {family.value!r} is needed"
        raise CorruptObjectError(message, key=part.path)
    if int(version) > SCHEMA_VERSION:
        message = (
            f"{store.url}/{part.path} has schema version {version}, newer than {SCHEMA_VERSION}, the newest that "
            "this code reads; update Motley"
        )
        raise SchemaVersionError(message, key=part.path)


def _conformed(store: Store, part: Part, table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    import pyarrow as pa

    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    array = table.column(field.name)
    if array.type != field.type:
        raise _column_error(store, part, field.name, f"has type {array.type}, but {field.type} is needed")
    if not field.nullable and array.null_count:
        raise _column_error(store, part, field.name, f"is required but null in {array.null_count} rows")
    return array


def _column_error(store: Store, part: Part, name: str, fault: str) -> CorruptObjectError:
    message = f"{store.url}/{part.path}: column {name} {fault}; repeat the stage that wrote the file"
    return CorruptObjectError(message, key=part.path)
