"""What crossed the links of a run over regions, as tables for a person."""

from __future__ import annotations

from rich.console import Console

from cli.tables import table
from scripts.regions.airflow import AIRFLOW_JOURNAL
from scripts.regions.crossings import rollout_facts, traffic, weight_facts
from scripts.regions.layout import Regions
from storage.policies import DELTA_PART


def print_summary(layout: Regions, run: str, iterations: int) -> None:
    """Print what crossed by kind of object and by policy version, and where the rows lie."""
    console = Console()
    for way in (way for region in layout.regions for way in layout.ways_out(region.name)):
        journals = {f"store of {way.peer}": layout.journal(way)}
        if way.peer == layout.home.name:
            journals["Airflow"] = layout.place(way.asker).folder / AIRFLOW_JOURNAL
        rows = [
            [what, kind, one.read_bytes, one.written_bytes, one.num_requests]
            for what, journal in journals.items()
            for kind, one in sorted(traffic(journal).items(), key=lambda item: -(item[1].read_bytes or 0))
        ]
        columns = ["of", "objects", "bytes read", "bytes written", "requests"]
        console.print(table(f"{way.asker} asked {way.peer}", columns, rows))
    console.print(table("Policy versions that crossed", _POLICY_COLUMNS, _policy_rows(layout, run, iterations)))
    console.print(table("Rows in a region's store", _ROW_COLUMNS, _rows(layout, run, iterations)))


_POLICY_COLUMNS = ["into", "version", "bytes", "bytes crossed", "fraction", "its store holds"]
_ROW_COLUMNS = ["store of", "iteration", "rows by maker", "bytes read from elsewhere"]


def _policy_rows(layout: Regions, run: str, iterations: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for fact in weight_facts(layout, run, iterations):
        whole = sum(size for name, size in fact["bytes"].items() if name != DELTA_PART)
        crossed = sum(fact["crossed_bytes"].values())
        held = fact["form_in_region"] or "not"
        rows.append([fact["region"], fact["version"], whole, crossed, crossed / whole, held])
    return rows


def _rows(layout: Regions, run: str, iterations: int) -> list[list[object]]:
    return [
        [
            fact["region"], fact["iteration"],
            ", ".join(f"{count} by {name}" for name, count in fact["rows_by_maker"].items()),
            fact["bytes_read_elsewhere"],
        ]
        for fact in rollout_facts(layout, run, iterations)
    ]  # fmt: skip
