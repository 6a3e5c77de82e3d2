"""Metrics of a run as one long table, from its iteration records, and their export to Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from storage.documents import fingerprint
from storage.iterations import find_records
from storage.layout import METRICS_NAME, metrics_folder
from storage.manifest import Manifest, PartSource, commit
from storage.parquet_io import encode_table
from storage.runs import IterationRecord
from storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

METRICS_KIND = "metrics"


def metrics_schema() -> pa.Schema:
    """Return the schema of the long metrics table: run, iteration, policy_version, optimizer_step, name, value."""
    import pyarrow as pa

    fields = [
        ("run", pa.string(), "Run name."),
        ("iteration", pa.int64(), "RL iteration."),
        ("policy_version", pa.int64(), "Policy version that the iteration committed; null if none."),
        ("optimizer_step", pa.int64(), "Number of the optimizer step in the iteration, from 0; null for the whole."),
        (
            "name",
            pa.string(),
            "Metric; its unit is the name's suffix. measured_s/<stage>, predicted_s/<stage>, counts/<what>.",
        ),
        ("value", pa.float64(), "Value; null = not defined in this iteration."),
    ]
    return pa.schema([pa.field(name, kind, metadata={"meaning": meaning}) for name, kind, meaning in fields])


def metrics_table(store: Store, run: str) -> pa.Table:
    """Return all metrics of a run, ordered by iteration, optimizer step and name."""
    return metrics_of(find_records(store, run))


def metrics_of(records: Iterable[IterationRecord]) -> pa.Table:
    """Return the metrics of some iterations, in the order of their records, by optimizer step and name."""
    import pyarrow as pa

    rows = [row for record in records for row in _rows(record)]
    return pa.Table.from_pylist(rows, schema=metrics_schema())


def export_metrics(store: Store, run: str, *, created_by: str) -> Manifest:
    """Commit the metrics of all reported iterations as Parquet; a later export replaces it."""
    table = metrics_table(store, run)
    data = encode_table(table)
    return commit(
        store,
        metrics_folder(run),
        {METRICS_NAME: PartSource(data, table.num_rows)},
        kind=METRICS_KIND,
        input_fingerprint=fingerprint(METRICS_KIND, table.to_pylist()),
        created_by=created_by,
    )


def _rows(record: IterationRecord) -> Iterator[dict[str, Any]]:
    base = {"run": record.run, "iteration": record.iteration, "policy_version": record.policy_version_end}
    values: dict[str, float | None] = {
        **record.metrics,
        **{f"measured_s/{name}": value for name, value in record.measured_s.items()},
        **{f"predicted_s/{name}": value for name, value in record.predicted_s.items()},
        **{f"counts/{name}": float(value) for name, value in record.counts.items()},
    }
    for name in sorted(values):
        yield {**base, "optimizer_step": None, "name": name, "value": values[name]}
    for step, metrics in enumerate(record.optimizer_steps):
        for name in sorted(metrics):
            yield {**base, "optimizer_step": step, "name": name, "value": metrics[name]}
