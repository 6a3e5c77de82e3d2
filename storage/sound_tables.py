"""The quick check of rows before they are stored: whole columns at once, yes or no.

``storage.row_faults`` says what is wrong with which row; it goes row by row in Python and is only asked when the answer
here is no.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from storage.layout import Split
from storage.rollout_schema import COLUMNS, Family, RewardStatus, RowIdentity, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa


def sound_table(
    rows: Sequence[Mapping[str, Any]] | pa.Table, family: Family, fixed: Mapping[str, Any]
) -> pa.Table | None:
    """Return rows as a table of the family's schema, completed; ``None`` if anything about them is to be refused.

    Args:
        rows: One mapping per row, or a table.
        family: Family of the rows.
        fixed: Columns that are the same in every row; row and group ids of rollouts are computed here too.
    """
    import pyarrow as pa

    known = {column.name for column in COLUMNS[family]}
    try:
        if not isinstance(rows, pa.Table):
            if not all(row.keys() <= known for row in rows):
                return None
            rows = _table_of(rows, family)
        table = _completed(rows, family, fixed) if set(rows.column_names) <= known else None
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return table if table is not None and _is_sound(table, family) else None


def non_finite_columns(table: pa.Table) -> list[str]:
    """Return a sentence for each column with a number that is not finite, or with a null inside a list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    faults = []
    for field in table.schema:
        array = table.column(field.name)
        if pa.types.is_list(field.type):
            flat = pc.list_flatten(array)
            if flat.null_count:
                faults.append(f"column {field.name} holds a null inside a list")
            array = flat
        elif pa.types.is_map(field.type):
            array = pa.chunked_array([chunk.items for chunk in array.chunks], type=field.type.item_type)
        if pa.types.is_floating(array.type) and not pc.all(pc.is_finite(array), skip_nulls=True, min_count=0).as_py():
            faults.append(f"column {field.name} holds a number that is not finite")
    return faults


def _table_of(rows: Sequence[Mapping[str, Any]], family: Family) -> pa.Table:
    import pyarrow as pa

    given = set().union(*(row.keys() for row in rows)) if rows else set()
    fields = [field for field in arrow_schema(family) if field.name in given]
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in fields]
    return pa.table(arrays, schema=pa.schema(fields)) if fields else pa.table({"_rows": pa.nulls(len(rows))})


def _completed(table: pa.Table, family: Family, fixed: Mapping[str, Any]) -> pa.Table | None:
    """Return all columns of the schema, or ``None`` if a column contradicts what follows from the place."""
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = arrow_schema(family)
    columns = {name: table.column(name) for name in table.column_names}
    filled: dict[str, Any] = {
        name: pa.repeat(pa.scalar(value, schema.field(name).type), table.num_rows)
        for name, value in fixed.items()
        if name != "lineage"  # part of identities, no column
    }
    if family is Family.ROLLOUTS:
        filled |= _identities(columns, fixed)
    for name, expected in filled.items():
        if name in columns and not (
            columns[name].null_count == 0 and pc.all(pc.equal(columns[name], expected), min_count=0).as_py()
        ):
            return None
        columns[name] = expected
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    # Whether a required column is null is asked below; Arrow's own flag would not look.
    return pa.table(arrays, schema=schema)


def _identities(columns: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    identity = RowIdentity(fixed["run"], fixed["iteration"], Split(fixed["split"]), fixed.get("lineage", 0))
    prompts = columns["prompt_id"].to_pylist() if "prompt_id" in columns else []
    samples = columns["sample_index"].to_pylist() if "sample_index" in columns else []
    row_ids = [identity.row_id(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
    return {
        "row_id": pa.array(row_ids, pa.string()),
        "group_id": pa.array(map(identity.group_id, prompts), pa.string()),
    }


def _is_sound(table: pa.Table, family: Family) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    for column in COLUMNS[family]:
        array = table.column(column.name)
        if column.is_required and array.null_count:
            return False
        if column.values and not pc.all(pc.is_in(array.drop_null(), pa.array(column.values)), min_count=0).as_py():
            return False
    if pc.count_distinct(table.column("row_id")).as_py() != table.num_rows:
        return False
    return _is_consistent(table, family) and not non_finite_columns(table)


def _is_consistent(table: pa.Table, family: Family) -> bool:
    import pyarrow.compute as pc

    if family is Family.ROLLOUTS:
        lengths = [pc.list_value_length(table.column(n)) for n in ("completion_token_ids", "sampler_logprobs")]
        ordered = pc.less_equal(table.column("policy_version_first"), table.column("policy_version_last"))
        agrees = pc.and_(pc.equal(*lengths), ordered)
    elif family is Family.REWARD:
        is_ok = pc.equal(table.column("reward_status"), RewardStatus.OK.value)
        agrees = pc.equal(pc.is_valid(table.column("reward")), is_ok)
    elif family is Family.TRAINING:
        agrees = pc.equal(pc.is_valid(table.column("dropped_reason")), table.column("is_dropped"))
    else:
        return True
    return bool(pc.all(agrees, min_count=0).as_py())
