"""Checks of rows before they are stored; all faults of a shard are reported together, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from storage.errors import InvalidInputError
from storage.layout import Split
from storage.rollout_schema import COLUMNS, Family, RewardStatus, arrow_schema, group_id, row_id
from storage.sound_tables import non_finite_columns, sound_table

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 5
"""Faults quoted in a message; the rest are counted."""


def checked_table(
    rows: Sequence[Mapping[str, Any]] | pa.Table, family: Family, where: str, fixed: Mapping[str, Any]
) -> pa.Table:
    """Return rows as a table of the family's schema, or refuse them with every fault.

    Args:
        rows: One mapping per row, or a table.
        family: Family of the rows.
        where: Shard, for the message.
        fixed: Columns that are the same in every row (run, iteration, split, shard) and filled in here; row and
            group ids of rollouts are computed here too, from `lineage` as well, which is no column. A value already
            there must agree.

    Raises:
        InvalidInputError: Unknown or missing columns, wrong types, null where a value is needed, non-finite numbers,
            lengths of tokens and log-probs that differ, a reward that contradicts its status, or doubled row ids.
    """
    import pyarrow as pa

    table = sound_table(rows, family, fixed)
    if table is not None:
        return table
    listed = rows.to_pylist() if isinstance(rows, pa.Table) else [dict(row) for row in rows]
    known = {column.name for column in COLUMNS[family]}
    faults: list[str] = []
    for index, row in enumerate(listed):
        faults += [f"row {index}: {fault}" for fault in _completed(row, family, fixed)]
        faults += [f"row {index}: column {name} is not in the schema" for name in sorted(row.keys() - known)]
    faults += [f"row {index}: {fault}" for index, row in enumerate(listed) for fault in _faults(row, family)]
    counted = Counter(row.get("row_id") for row in listed)
    faults += [f"row id {name} occurs {count} times" for name, count in counted.items() if count > 1]
    if faults:
        raise _refusal(where, faults)
    try:
        table = pa.Table.from_pylist(listed, schema=arrow_schema(family))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _refusal(where, [f"a value does not fit its column: {error}"]) from error
    faults = non_finite_columns(table)
    if faults:
        raise _refusal(where, faults)
    return table


def _completed(row: dict[str, Any], family: Family, fixed: Mapping[str, Any]) -> Iterator[str]:
    """Fill in what the caller need not give; yield disagreements."""
    given = dict(fixed)
    if family is Family.ROLLOUTS and isinstance(row.get("prompt_id"), str) and isinstance(row.get("sample_index"), int):
        split = Split(fixed["split"])
        lineage = given.pop("lineage", 0)
        given["row_id"] = row_id(
            fixed["run"], fixed["iteration"], row["prompt_id"], row["sample_index"], split, lineage
        )
        given["group_id"] = group_id(fixed["run"], fixed["iteration"], row["prompt_id"], split, lineage)
    given.pop("lineage", None)
    for name, value in given.items():
        found = row.setdefault(name, value)
        if found != value:
            yield f"column {name} is {found!r}, but {value!r} follows from where it is written"


def _faults(row: Mapping[str, Any], family: Family) -> Iterator[str]:
    for column in COLUMNS[family]:
        value = row.get(column.name)
        if value is None and column.is_required:
            yield f"column {column.name} is required"
        elif column.values and value is not None and value not in column.values:
            yield f"column {column.name} is {value!r}, allowed are {', '.join(column.values)}"
    if family is Family.ROLLOUTS:
        yield from _rollout_faults(row)
    if family is Family.REWARD and (row.get("reward") is not None) != (row.get("reward_status") == RewardStatus.OK):
        yield f"reward is {row.get('reward')!r} with status {row.get('reward_status')!r}: a value exactly when ok"
    if family is Family.TRAINING and bool(row.get("is_dropped")) != (row.get("dropped_reason") is not None):
        yield f"is_dropped is {row.get('is_dropped')!r} with reason {row.get('dropped_reason')!r}: a reason if dropped"


def _rollout_faults(row: Mapping[str, Any]) -> Iterator[str]:
    tokens, logprobs = row.get("completion_token_ids"), row.get("sampler_logprobs")
    if tokens is not None and logprobs is not None and len(tokens) != len(logprobs):
        yield f"{len(tokens)} completion tokens but {len(logprobs)} sampler_logprobs"
    first, last = row.get("policy_version_first"), row.get("policy_version_last")
    if isinstance(first, int) and isinstance(last, int) and first > last:
        yield f"policy_version_first {first} is above policy_version_last {last}"


def _refusal(where: str, faults: Sequence[str]) -> InvalidInputError:
    more = f" and {len(faults) - _SHOWN} more faults" if len(faults) > _SHOWN else ""
    return InvalidInputError(f"{where}: rows are refused: {'; '.join(faults[:_SHOWN])}{more}")
