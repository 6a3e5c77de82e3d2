"""`motley rewind RUN --to VERSION`: go back to a policy version and make everything after it anew.

What was made before is set aside, not deleted (`storage.superseded`). The iterations run again as one backfill of the
range, in order; further ones follow by themselves.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.errors import InputError
from cli.follow import RunFollower, run_iteration
from cli.follow_view import follow
from cli.output import Output
from cli.run_control import LiveRun, RunArgument, live_run, stop_run
from cli.run_lookup import open_entry_store
from cli.run_outcome import outcome_of, outcome_text
from stages.runs import ResolvedRun
from storage.policies import resolve_policy
from storage.store import open_store
from storage.superseded import rewind as rewind_data

app = typer.Typer()


@app.command()
def rewind(
    run: RunArgument,
    to: Annotated[int, typer.Option("--to", min=0, help="Policy version to go on from.")],
    reason: Annotated[str, typer.Option(help="Why; stands in the run's history.")] = "no reason given",
    detach: Annotated[bool, typer.Option("--detach", help="Don't follow; the run goes on by itself.")] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Go back to a policy version and make the iterations after it anew; what they had made is kept, set aside."""
    output = Output(is_json=json)
    with live_run(run, home_of(home)) as live:
        check_version(live, to)
        stop_run(live)
        set_aside(live.resolved, to, reason)
        output.progress(f"run {live.entry.run} is back at policy version {to}")
        again = [run_iteration(item) for item in live.api.dag_runs(live.dag_id) if run_iteration(item) >= to]
        if again:
            live.api.backfill_range(
                live.dag_id, to, max(again), is_success_redone=True, max_active_runs=live.entry.max_staleness + 1
            )
        live.api.set_paused(live.dag_id, is_paused=False)
        store = open_entry_store(live.entry)
        if not detach:
            follow(RunFollower(api=live.api, store=store, entry=live.entry), output)
        outcome = outcome_of(live.entry, store, live.deployment.url)
        text = f"Run {live.entry.run} goes on by itself from policy version {to}." if detach else outcome_text(outcome)
        output.result(outcome, text)


def check_version(live: LiveRun, version: int) -> None:
    """Refuse a version to which a run can't go back.

    Raises:
        InputError: it is no earlier version of the run.
        ObjectMissingError: it is not kept any more.
    """
    name, head, first = live.entry.run, live.head(), live.entry.first_iteration
    if head is None or head <= first:
        raise InputError(f"Run {name} has trained no policy version yet, so there is nothing to rewind.")
    if not first <= version < head:
        raise InputError(
            f"Run {name} can go back to the policy versions {first} to {head - 1} (its newest is {head}), not to "
            f"{version}."
        )
    resolve_policy(open_entry_store(live.entry), name, version)


def set_aside(run: ResolvedRun, version: int, reason: str) -> None:
    """Set everything aside that was made from a version on, in the stores of all regions."""
    others = [open_store(root) for root in dict.fromkeys(run.roots.values()) if root != run.home_root]
    rewind_data(open_store(run.home_root), others, run.name, version, reason=reason, at=datetime.now(UTC))
