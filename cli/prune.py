"""`motley rollouts prune`: remove the rollouts that a rule does not keep."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.errors import InputError
from cli.output import Output
from cli.run_lookup import FoundRun, find_run
from cli.runs import RunArgument
from cli.tables import table
from stages.rollout_policy import needed_rollouts, rollout_rule
from stages.runs import load_run
from storage.iterations import find_iterations
from storage.rollout_retention import RolloutRule, old_rollouts, remove_rollouts


def prune(
    run: RunArgument,
    keep_iterations: Annotated[
        int | None, typer.Option(min=1, help="Newest committed iterations kept; default: the job's storage section.")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Also keep iterations that ended within so many days.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Remove old rollouts with their rewards, log-probs and training columns; records and evaluations stay.

    Never removed: what is not committed yet, what waits in the buffer of a resume point, what a running stage uses.

    Example: motley rollouts prune quickstart --keep-iterations 20 --keep-days 7 --dry-run
    """
    output = Output(is_json=json)
    found = find_run(run, home_of(home))
    rule, now = _rule(found, keep_iterations, keep_days), datetime.now(UTC)
    stores = found.stores()
    old = old_rollouts(
        stores, found.name, rule, now,
        iterations=find_iterations(found.rows_store(), found.name), needed=needed_rollouts(found.store, found.name),
    )  # fmt: skip
    gone = old if dry_run else remove_rollouts(stores, found.name, rule, now, old)
    going = {entry.iteration for entry in gone if entry.why_kept is None}
    rows = [
        {
            "iteration": entry.iteration,
            "rows": entry.rows,
            "bytes": entry.size_bytes,
            "is_removed": entry.iteration in going,
            "because": entry.why_kept or ("" if entry.iteration in going else "a stage that just began uses it"),
        }
        for entry in old
    ]
    if json:
        output.result({"run": found.name, "rule": str(rule), "is_dry_run": dry_run, "iterations": rows}, "")
        return
    if rows:
        output.console.print(
            table(f"Old rollouts of {found.name}", list(rows[0]), [list(row.values()) for row in rows])
        )
    size_mb = sum(entry.size_bytes for entry in old if entry.iteration in going) / 1e6
    said = "would be removed" if dry_run else "removed"
    output.console.print(
        f"{str(rule).capitalize()}; rollouts of {len(going)} iteration(s), {size_mb:.1f} MB, {said}.",
        markup=False,
    )


def _rule(found: FoundRun, keep_iterations: int | None, keep_days: float | None) -> RolloutRule:
    if keep_iterations is not None or keep_days is not None:
        return RolloutRule(keep_iterations=keep_iterations, keep_days=keep_days)
    rule = rollout_rule(load_run(found.store.url, found.name).job.storage)
    if rule is None:
        raise InputError(
            f"The job of run {found.name} keeps all rollouts (storage.keep_rollouts, storage.keep_rollouts_days); give "
            "--keep-iterations or --keep-days."
        )
    return rule
