"""SQL over a run: a DuckDB connection with views that follow the manifests, on any store.

Views: ``rollouts``, ``rewards``, ``reference``, ``critic_values``, ``training`` (the column families),
``completions`` (rollouts with all families joined), ``listed`` (what lists filter and sort by, without texts and lists
of tokens), ``iterations`` (the records) and ``metrics`` (long table).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from storage.arrow_files import dataset_of
from storage.iterations import find_iterations, find_shards, records_of
from storage.layout import Split
from storage.manifest import Manifest
from storage.metrics import metrics_of
from storage.rollout_schema import COLUMNS, Family, arrow_schema
from storage.runs import IterationRecord, load_run
from storage.store import Store

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

VIEWS: dict[Family, str] = {
    Family.ROLLOUTS: "rollouts",
    Family.REWARD: "rewards",
    Family.REFERENCE: "reference",
    Family.VALUES: "critic_values",
    Family.TRAINING: "training",
}
"""View of each column family; ``values`` is a keyword of SQL."""

LISTED = """SELECT rollouts.row_id, prompt_id, prompt_index, sample_index, split, iteration, finish_reason,
    policy_version_first, policy_version_last, region, machine, len(completion_token_ids) AS num_tokens,
    reward, reward_status, advantage, is_dropped, dropped_reason, staleness
    FROM rollouts LEFT JOIN rewards ON rewards.row_id = rollouts.row_id
                  LEFT JOIN training ON training.row_id = rollouts.row_id"""
"""Query behind the view ``listed``."""

Shards = Mapping[Family, Sequence[Manifest]]
"""Manifests of shards, by family."""


def connect(store: Store, run: str, iterations: Iterable[int] | None = None) -> duckdb.DuckDBPyConnection:
    """Open an in-memory DuckDB connection with the views of one run.

    The views hold what is committed now. Rows are read when a query runs, only the columns that it needs.

    Args:
        store: Where the run lies.
        run: Run name.
        iterations: The iterations that the views hold (split eval: policy versions); default all. Naming them spares
            the look-ups of all others.

    Raises:
        ObjectMissingError: No such run, or a file that a manifest names is gone.
    """
    load_run(store, run)
    wanted = find_iterations(store, run) if iterations is None else list(iterations)
    connection = connect_shards(store, shards_of(store, run, wanted))
    records = records_of(store, run, wanted)
    connection.register("iterations", _iterations_table(records))
    connection.register("metrics", metrics_of(records))
    connection.execute(f"CREATE TEMP VIEW listed AS {LISTED}")
    return connection


def shards_of(
    store: Store, run: str, iterations: Sequence[int], splits: Sequence[Split] = tuple(Split)
) -> dict[Family, list[Manifest]]:
    """Return the manifests of the committed shards of some iterations."""
    return {
        family: [found for split in splits for found in find_shards(store, run, family, split, iterations)]
        for family in VIEWS
    }


def connect_shards(store: Store, shards: Shards) -> duckdb.DuckDBPyConnection:
    """Open an in-memory DuckDB connection with the views of some shards: the families, and ``completions``.

    Raises:
        ObjectMissingError: A file that a manifest names is gone.
    """
    import duckdb

    connection = duckdb.connect()
    for family, view in VIEWS.items():
        keys = [part.path for manifest in shards[family] for part in manifest.parts]
        schema = arrow_schema(family)
        connection.register(view, dataset_of(store, keys, schema) if keys else schema.empty_table())
    connection.execute(f"CREATE TEMP VIEW completions AS {completions_of(tuple(VIEWS))}")
    return connection


def completions_of(families: Iterable[Family]) -> str:
    """Return a query for the rollouts joined with some families only; a join that nobody needs costs its read."""
    selected, joins, taken = ["rollouts.*"], [], {column.name for column in COLUMNS[Family.ROLLOUTS]}
    for family in families:
        if family is Family.ROLLOUTS:
            continue
        view = VIEWS[family]
        selected += [f'{view}."{column.name}"' for column in COLUMNS[family] if column.name not in taken]
        joins.append(f"LEFT JOIN {view} ON {view}.row_id = rollouts.row_id")
    return f"SELECT {', '.join(selected)} FROM rollouts {' '.join(joins)}"


def _iterations_table(records: list[IterationRecord]) -> pa.Table:
    import pyarrow as pa

    numbers = pa.map_(pa.string(), pa.float64())
    time = pa.timestamp("us", tz="UTC")
    schema = pa.schema(
        [
            ("run", pa.string()),
            ("iteration", pa.int64()),
            ("plan", pa.int64()),
            ("policy_version_start", pa.int64()),
            ("policy_version_end", pa.int64()),
            ("started_at", time),
            ("ended_at", time),
            ("measured_s", numbers),
            ("predicted_s", numbers),
            ("counts", pa.map_(pa.string(), pa.int64())),
            ("metrics", numbers),
            ("alarms", pa.list_(pa.string())),
        ]
    )
    return pa.Table.from_pylist([record.model_dump(include=set(schema.names)) for record in records], schema=schema)
