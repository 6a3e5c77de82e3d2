"""`motley runs`, `motley show`, `motley verify`: which runs there are, how one went, whether its data is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.progress import Progress
from rich.text import Text

from cli.deployment import HomeOption, JsonOption, home_of
from cli.errors import RunFailedError
from cli.output import Output
from cli.run_lookup import RUN_HELP, FoundRun, find_run
from cli.tables import curve, table
from stages.errors import ContractError
from stages.home import MotleyHome
from stages.run_entry import list_run_entries
from storage.errors import CorruptObjectError, ObjectMissingError, SchemaVersionError, StorageError
from storage.iterations import find_records
from storage.policies import head_version
from storage.runs import IterationRecord, load_run
from storage.verify import VerifyReport, verify_run

app = typer.Typer()

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]


@app.command()
def runs(home: HomeOption = None, json: JsonOption = False) -> None:
    """List the runs of this deployment with how far each one is."""
    output, place = Output(is_json=json), home_of(home)
    rows = [_run_row(file.stem, place) for file in list_run_entries(place.runs_dir)]
    columns = ("run", "done", "iterations", "reward", "created", "root")
    shown = [row | {"root": "\n".join(row["roots"] or [row["root"] or ""])} for row in rows]
    if json:
        output.result({"runs": rows}, "")
    elif rows:
        output.console.print(table("Runs", columns, [[row[c] for c in columns] for row in shown]))
        for row in rows:
            if row.get("fault"):
                output.console.print(f"{row['run']}: {row['fault']}", style="red", markup=False)
    else:
        output.result({}, f"No runs in {place.path}; start one with `motley run --job JOB --cluster CLUSTER`.")


def _run_row(name: str, home: MotleyHome) -> dict[str, Any]:
    """Return how far a run is; one that can't be read says why, beside the others."""
    row: dict[str, Any] = dict.fromkeys(("created", "iterations", "done", "reward", "root", "roots"))
    row["run"] = name
    try:
        found = find_run(name, home)
        row |= {"root": found.store.url, "roots": _roots(found)}
        record = load_run(found.store, found.name)
        records = find_records(found.store, found.name)
        head = head_version(found.store, found.name)
    except (ContractError, StorageError) as error:
        return row | {"fault": str(error)}
    return row | {
        "created": record.created_at.isoformat(timespec="seconds"),
        "iterations": found.entry.iterations if found.entry else record.num_iterations,
        "done": head or 0,
        "reward": records[-1].metrics.get("reward_mean") if records else None,
    }


def _roots(found: FoundRun) -> list[str]:
    """Return the roots of the stores of all regions, that of the records first."""
    others = [] if found.entry is None else [root for root in found.entry.roots.values() if root != found.entry.root]
    return list(dict.fromkeys([found.store.url, *others]))


@app.command()
def show(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Show one run: its iterations, policy versions, seconds by stage, alarms, and the reward curve."""
    output = Output(is_json=json)
    found = find_run(run, home_of(home))
    record = load_run(found.store, found.name)
    records = find_records(found.store, found.name)
    head = head_version(found.store, found.name)
    if json:
        document = {
            "run": found.name,
            "root": found.store.url,
            "policy_version": head,
            "iterations": found.entry.iterations if found.entry else record.num_iterations,
            "records": [item.model_dump(mode="json") for item in records],
        }
        output.result(document, "")
        return
    output.console.print(_overview(found, record.num_iterations, head, records))


def _overview(found: FoundRun, num_iterations: int, head: int | None, records: list[IterationRecord]) -> Group:
    columns = ("iteration", "policy", "reward", "eval", "KL", "loss", "tokens/s", "seconds", "overhead", "alarms")
    rows = [_iteration_row(item) for item in records]
    points = [(item.iteration, reward) for item in records if (reward := item.metrics.get("reward_mean")) is not None]
    total = found.entry.iterations if found.entry else num_iterations
    head_line = f"{found.name}: {head or 0} of {total} iterations, policy version {0 if head is None else head}"
    parts: list[Any] = [Text(head_line, style="bold"), Text(f"data: {found.store.url}/{found.name}")]
    parts.append(table("Iterations", columns, rows))
    xs, ys = [x for x, _ in points], [y for _, y in points]
    parts.append(Text(curve("mean reward of the sampled completions by iteration", xs, ys), no_wrap=True))
    alarms = [f"iteration {item.iteration}: {alarm}" for item in records for alarm in item.alarms]
    return Group(*parts, *(Text(alarm, style="red") for alarm in alarms))


def _iteration_row(item: IterationRecord) -> list[Any]:
    metrics = item.metrics
    seconds = (item.ended_at - item.started_at).total_seconds() if item.started_at and item.ended_at else None
    version = f"{item.policy_version_start} → {item.policy_version_end}"
    names = ("reward_mean", "eval_reward_mean", "kl", "loss", "tokens_per_s")
    values = [metrics.get(name) for name in names]
    return [item.iteration, version, *values, seconds, metrics.get("overhead_fraction"), len(item.alarms) or None]


@app.command()
def verify(
    run: RunArgument,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes and rows only, without reading every byte.")
    ] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Check every committed artefact of a run against its manifest, in the stores of all its regions.

    The exit code is 1 when something is damaged.
    """
    output = Output(is_json=json)
    found = find_run(run, home_of(home))
    try:
        stores = found.stores()
    except (CorruptObjectError, ObjectMissingError, SchemaVersionError):
        stores = [found.store]  # without its record the run has this region only; the check says what is wrong with it
    with Progress(console=output.progress_console, transient=True, disable=not output.is_interactive) as bar:
        task = bar.add_task("checking", total=None)

        def advance(done: int, total: int, key: str) -> None:
            bar.update(task, completed=done, total=total, description=Path(key).name or "done")

        store, *others = stores
        report = verify_run(store, found.name, others=others, is_hash_checked=not quick, progress=advance)
    urls = [store.url for store in stores]
    output.result({**_verify_document(found, report), "stores": urls}, _verify_text(found, report))
    if not report.is_good:
        raise RunFailedError(
            f"Run {found.name} has damaged data (listed above); restore the objects named, or remove the artefacts "
            f"and compute their iterations again with `motley resume {found.name}`."
        )


def _verify_document(found: FoundRun, report: VerifyReport) -> dict[str, Any]:
    return {
        "run": found.name,
        "is_good": report.is_good,
        "artefacts": report.num_artefacts,
        "documents": report.num_documents,
        "objects": report.num_parts,
        "size_bytes": report.size_bytes,
        "findings": [
            {"severity": str(f.severity), "key": f.key, "message": f.message} for f in report.findings
        ],
    }  # fmt: skip


def _verify_text(found: FoundRun, report: VerifyReport) -> str:
    lines = [f"{f.severity}: {f.key}: {f.message}" for f in report.findings]
    verdict = "whole" if report.is_good else "DAMAGED"
    lines.append(
        f"{found.name} is {verdict}: {report.num_artefacts} artefacts, {report.num_documents} documents, "
        f"{report.num_parts} objects, {report.size_bytes / 1e6:.1f} MB checked."
    )
    return "\n".join(lines)
