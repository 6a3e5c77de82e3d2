"""Rollout shards and column families: write one shard, find it again, read an iteration.

Readers never list: shard 0's manifest says how many shards the iteration has. Rows come back ordered by prompt and
sample, whatever the number of shards and the order of writing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from storage.errors import CorruptObjectError, DuplicateRowError, InvalidInputError, ObjectMissingError
from storage.layout import ROWS_NAME, Split, manifest_key, shard_folder
from storage.manifest import (
    Manifest,
    PartSource,
    check_schema_version,
    commit,
    find_valid,
    load_manifest,
)
from storage.parquet_io import content_digest, encode_table, open_parquet, read_table, sorted_table
from storage.removed_rollouts import removal_sentence
from storage.rollout_schema import COLUMNS, SCHEMA_VERSION, Family
from storage.row_faults import checked_table
from storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

_ORDER = ("prompt_index", "sample_index")


def write_rollouts(
    store: Store,
    run: str,
    iteration: int,
    shard: int,
    num_shards: int,
    rows: Sequence[Mapping[str, Any]] | pa.Table,
    *,
    input_fingerprint: str,
    created_by: str,
    split: Split | str = Split.TRAIN,
    attempt: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    lineage: int = 0,
) -> Manifest:
    """Commit one shard of an iteration's rollouts.

    Args:
        store: Store of the maker's region.
        run: Run name.
        iteration: RL iteration; for split eval the policy version that was evaluated.
        shard: Index of this shard, in [0, num_shards).
        num_shards: Shards that the iteration has; all of them must say the same.
        rows: One mapping per completion with the columns of ``Family.ROLLOUTS``. ``run``, ``iteration``, ``split``,
            ``shard``, ``row_id`` and ``group_id`` are filled in.
        input_fingerprint: SHA-256 of everything that decides the tokens (policy hash, prompts, sampling, seed).
        created_by: Who writes.
        split: Train or eval.
        attempt: Token of this attempt; default a fresh one.
        metadata: JSON-able extras for the manifest.
        lineage: How often the iteration was set aside by a rewind (``storage.superseded``); part of the row ids.

    Returns:
        The committed manifest (an earlier attempt's if it holds the same content).

    Raises:
        InvalidInputError: Rows break the schema; every fault is counted, the first five quoted.
        AlreadyPublishedError: Other content is committed for the same inputs.
    """
    return write_family(
        store,
        run,
        iteration,
        Family.ROLLOUTS,
        shard,
        num_shards,
        rows,
        input_fingerprint=input_fingerprint,
        created_by=created_by,
        split=split,
        attempt=attempt,
        metadata=metadata if lineage == 0 else {**(metadata or {}), "lineage": lineage},
        lineage=lineage,
    )


def write_family(
    store: Store,
    run: str,
    iteration: int,
    family: Family | str,
    shard: int,
    num_shards: int,
    rows: Sequence[Mapping[str, Any]] | pa.Table,
    *,
    input_fingerprint: str,
    created_by: str,
    split: Split | str = Split.TRAIN,
    attempt: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    lineage: int = 0,
) -> Manifest:
    """Commit one shard of a column family; arguments and errors as :func:`write_rollouts`.

    A family's shards need not be those of the rollouts: rows are joined by ``row_id``.
    """
    name = Family(family)
    if not 0 <= shard < num_shards:
        message = f"shard {shard} of {num_shards} shards is refused: 0 <= shard < num_shards is needed"
        raise InvalidInputError(message)
    folder = shard_folder(run, iteration, name.value, shard, split)
    fixed = {"run": run, "iteration": iteration, "split": Split(split).value, "shard": shard, "lineage": lineage}
    table = checked_table(rows, name, folder, fixed if name is Family.ROLLOUTS else {})
    table = sorted_table(table, _ORDER if name is Family.ROLLOUTS else ("row_id",)).combine_chunks()
    return commit(
        store,
        folder,
        {ROWS_NAME: PartSource(encode_table(table), table.num_rows)},
        kind=name.value,
        input_fingerprint=input_fingerprint,
        created_by=created_by,
        schema_version=SCHEMA_VERSION,
        policy_versions=_policy_versions(table) if name is Family.ROLLOUTS else (),
        metadata={**(metadata or {}), "shard": shard, "num_shards": num_shards},
        content_digest=content_digest(table, name),
        attempt=attempt,
    )


def find_shard(
    store: Store,
    run: str,
    iteration: int,
    shard: int,
    *,
    input_fingerprint: str | None = None,
    family: Family | str = Family.ROLLOUTS,
    split: Split | str = Split.TRAIN,
    is_hash_checked: bool = False,
) -> Manifest | None:
    """Return the shard's manifest if a retry may reuse it, else ``None``.

    Besides the manifest, sizes and fingerprint, the Parquet footer and row count are checked (P2).
    """
    folder = shard_folder(run, iteration, Family(family).value, shard, split)
    manifest = find_valid(store, folder, input_fingerprint=input_fingerprint, is_hash_checked=is_hash_checked)
    if manifest is None:
        return None
    try:
        for part in manifest.parts:
            open_parquet(store, part).close(force=True)
    except (CorruptObjectError, ObjectMissingError):
        return None
    return manifest


def shard_manifests(
    store: Store,
    run: str,
    iteration: int,
    family: Family | str = Family.ROLLOUTS,
    split: Split | str = Split.TRAIN,
) -> list[Manifest]:
    """Return the manifests of all shards of an iteration, in shard order.

    Raises:
        ObjectMissingError: A shard is not committed (all missing ones are named), or the rollouts were removed on
            purpose (when and why is said).
        CorruptObjectError: Shards disagree on how many there are.
    """
    name = Family(family)
    try:
        first = load_manifest(store, shard_folder(run, iteration, name.value, 0, split))
    except ObjectMissingError as error:
        sentence = removal_sentence(store, run, iteration) if split == Split.TRAIN else None
        if sentence is None:
            raise
        raise ObjectMissingError(f"{store.url}: {sentence}", key=error.key) from error
    num_shards = _num_shards(store, first)
    manifests, missing = [first], []
    for shard in range(1, num_shards):
        try:
            manifests.append(load_manifest(store, shard_folder(run, iteration, name.value, shard, split)))
        except ObjectMissingError:
            missing.append(str(shard))
    if missing:
        folder = shard_folder(run, iteration, name.value, 0, split).rpartition("/")[0]
        message = (
            f"{store.url}/{folder}: shards {', '.join(missing)} of {num_shards} are not committed; repeat the stage"
        )
        raise ObjectMissingError(message, key=folder)
    for manifest in manifests:
        check_schema_version(manifest, SCHEMA_VERSION)
        if _num_shards(store, manifest) != num_shards:
            message = (
                f"{store.url}/{manifest.key} belongs to {_num_shards(store, manifest)} shards, shard 0 to {num_shards}"
                ": a repeated stage has not written all its shards yet; repeat it"
            )
            raise CorruptObjectError(message, key=manifest.key)
    return manifests


def has_rollouts(
    store: Store,
    run: str,
    iteration: int,
    family: Family | str = Family.ROLLOUTS,
    split: Split | str = Split.TRAIN,
) -> bool:
    """Say whether shard 0 of an iteration's family is committed."""
    return store.exists(manifest_key(shard_folder(run, iteration, Family(family).value, 0, split)))


def iter_shards(
    store: Store,
    run: str,
    iteration: int,
    family: Family | str = Family.ROLLOUTS,
    *,
    columns: Sequence[str] | None = None,
    split: Split | str = Split.TRAIN,
) -> Iterator[pa.Table]:
    """Yield an iteration's shards one by one, so memory holds one shard.

    Args:
        store: Where from.
        run: Run name.
        iteration: RL iteration.
        family: Rollouts or a column family.
        columns: Columns wanted, default all of the family.
        split: Train or eval.
    """
    name = Family(family)
    wanted = _checked_columns(columns, (name,))
    for manifest in shard_manifests(store, run, iteration, name, split):
        for part in manifest.parts:
            yield read_table(store, part, name, wanted)


def read_family(
    store: Store,
    run: str,
    iteration: int,
    family: Family | str,
    *,
    columns: Sequence[str] | None = None,
    split: Split | str = Split.TRAIN,
) -> pa.Table:
    """Read a column family of an iteration, ordered by row id.

    Raises:
        ObjectMissingError: Not all shards are committed.
        CorruptObjectError: A file breaks its contract.
        DuplicateRowError: A row id occurs twice.
        InvalidInputError: A column is not in the family.
    """
    name = Family(family)
    wanted = _checked_columns(columns, (name,))
    table = _read_all(store, run, iteration, name, ["row_id", *(c for c in wanted if c != "row_id")], split)
    return sorted_table(table, ("row_id",)).select(wanted)


def read_rollouts(
    store: Store,
    run: str,
    iteration: int,
    *,
    columns: Sequence[str] | None = None,
    families: Sequence[Family | str] = (),
    split: Split | str = Split.TRAIN,
    is_complete: bool = True,
) -> pa.Table:
    """Read an iteration's rollouts, with families joined by row id, ordered by prompt and sample.

    Args:
        store: Where from.
        run: Run name.
        iteration: RL iteration (split eval: policy version evaluated).
        columns: Columns wanted, of the rollouts or of the families named; default all.
        families: Column families to join. Training columns of rows that another iteration consumed are null here; they
            lie beside that one's.
        split: Train or eval.
        is_complete: Refuse a family that lacks rows; if false, their columns are null.

    Raises:
        ObjectMissingError: A shard is not committed.
        CorruptObjectError: A file breaks its contract, or a family lacks or adds rows.
        DuplicateRowError: A row id occurs twice.
        InvalidInputError: A column is in none of the families.
    """
    names = tuple(Family(family) for family in families if Family(family) is not Family.ROLLOUTS)
    wanted = _checked_columns(columns, (Family.ROLLOUTS, *names))
    own = {column.name for column in COLUMNS[Family.ROLLOUTS]}
    needed = dict.fromkeys(["row_id", *_ORDER, *(name for name in wanted if name in own)])
    table = _read_all(store, run, iteration, Family.ROLLOUTS, list(needed), split)
    table = sorted_table(table, _ORDER)
    for name in names:
        joined = [column.name for column in COLUMNS[name] if column.name in wanted and column.name not in own]
        other = _read_all(store, run, iteration, name, ["row_id", *joined], split)
        if shard_manifests(store, run, iteration, name, split)[0].metadata.get("is_partial"):
            # Rollouts that wait in the buffer are decided on later, beside those of a later iteration.
            table = _joined(table, _only_rows_of(other, table), name, "", is_complete=False)
            continue
        table = _joined(table, other, name, f"{store.url}/{run}/iterations/{iteration}", is_complete=is_complete)
    return table.select(wanted)


def _read_all(
    store: Store, run: str, iteration: int, family: Family, columns: Sequence[str], split: Split | str
) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.concat_tables(iter_shards(store, run, iteration, family, columns=columns, split=split))
    if pc.count_distinct(table.column("row_id")).as_py() != table.num_rows:
        counted = Counter(table.column("row_id").to_pylist())
        doubled = sorted(name for name, count in counted.items() if count > 1)
        message = (
            f"{store.url}/{run}/iterations/{iteration}: {len(doubled)} row ids of {family.value} occur twice, "
            f"first {doubled[0]}; run `motley verify`"
        )
        raise DuplicateRowError(message, key=f"{run}/iterations/{iteration}")
    return table


def _only_rows_of(other: pa.Table, table: pa.Table) -> pa.Table:
    import pyarrow.compute as pc

    return other.filter(pc.is_in(other.column("row_id"), value_set=table.column("row_id").combine_chunks()))


def _joined(table: pa.Table, other: pa.Table, family: Family, where: str, *, is_complete: bool) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    indices = pc.index_in(table.column("row_id"), value_set=other.column("row_id").combine_chunks())
    num_missing = indices.null_count
    num_strange = other.num_rows - (table.num_rows - num_missing)
    if num_strange or (is_complete and num_missing):
        message = (
            f"{where}: family {family.value} lacks {num_missing} rows of the rollouts and has {num_strange} rows of "
            "none; repeat the stage that writes it"
        )
        raise CorruptObjectError(message)
    taken = other.drop_columns(["row_id"]).take(indices.cast(pa.int64()))
    for name in taken.column_names:
        table = table.append_column(taken.schema.field(name).with_nullable(True), taken.column(name))
    return table


def _checked_columns(columns: Sequence[str] | None, families: Sequence[Family]) -> list[str]:
    known = dict.fromkeys(column.name for family in families for column in COLUMNS[family])
    if columns is None:
        return list(known)
    unknown = [name for name in columns if name not in known]
    if unknown:
        message = f"columns {', '.join(unknown)} are in none of {', '.join(family.value for family in families)}"
        raise InvalidInputError(message)
    return list(dict.fromkeys(columns))


def _num_shards(store: Store, manifest: Manifest) -> int:
    value = manifest.metadata.get("num_shards")
    if not isinstance(value, int) or value < 1:
        message = f"{store.url}/{manifest.key}: field metadata/num_shards is {value!r}, a whole number >= 1 is needed"
        raise CorruptObjectError(message, key=manifest.key)
    return value


def _policy_versions(table: pa.Table) -> list[int]:
    versions: set[int] = set()
    for name in ("policy_version_first", "policy_version_last"):
        versions.update(table.column(name).unique().to_pylist())
    return sorted(versions)
