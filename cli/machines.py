"""`motley drain`, `motley add-machines`, `motley replan`: another placement for a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_workers import find_machine
from cli.documents import ClusterOption, PlanOption, read_cluster
from cli.errors import InputError
from cli.follow import run_iteration
from cli.output import Output
from cli.plan_by_hand import commit_plan, plan_by_hand
from cli.run_control import LiveRun, RunArgument, changed, live_run, rewritten, stop_run
from cli.run_register import check_served, register, wait_for_dag
from plans.spec.cluster import Cluster
from stages.run_entry import RunEntry
from stages.runs import demand_entry
from storage.layout import iteration_plan
from storage.store import open_store

app = typer.Typer()


@app.command()
def drain(
    run: RunArgument,
    machine: Annotated[str, typer.Argument(help="Name of the machine in the run's cluster.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Don't let the iteration finish; run it again without the machine.")
    ] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Give a machine no more work, from the next iteration on; its worker may then be ended.

    When the machine is gone already, use --now: rows of the present iteration may wait for it for ever.
    """
    output = Output(is_json=json)
    with live_run(run, home_of(home)) as live:
        entry = drained_entry(live, machine, is_undone=undo)
        again = stop_run(live) if now else []
        for iteration in again:  # its plan may use the machine; it is decided anew
            open_store(entry.root).delete(iteration_plan(entry.run, iteration))
        register(entry, live.home)
        wait_for_dag(live.api, entry)
        if again:
            live.api.backfill_range(live.dag_id, again[0], again[-1], is_success_redone=False)
            live.api.set_paused(live.dag_id, is_paused=False)
        what = "gets work again" if undo else "gets no more work"
        output.result(
            {"run": entry.run, "drained": list(entry.drained), "iterations_again": again},
            f"Machine {machine} of run {entry.run} {what}, from the next plan on.",
        )


def drained_entry(live: LiveRun, name: str, *, is_undone: bool) -> RunEntry:
    """Return the entry with a machine drained, or taken back; brings the run record up to date.

    Raises:
        InputError: no such machine, it is so already, it is the control machine, or no other one would be left.
    """
    run = live.resolved
    machine = find_machine(run.cluster, name)
    before = set(run.drained)
    if is_undone is not (name in before):
        raise InputError(f"Machine {name} of run {run.name} is {'not drained' if is_undone else 'drained already'}.")
    if machine is run.cluster.machines[0]:
        raise InputError(
            f"Machine {name} plans, commits and reports for run {run.name}, so it can't be drained; stop the run with "
            f"`motley stop {run.name}`, or fork it onto another cluster with `motley fork`."
        )
    return rewritten(run, drained=tuple(sorted(before - {name} if is_undone else before | {name})))


@app.command()
def add_machines(run: RunArgument, cluster: ClusterOption, home: HomeOption = None, json: JsonOption = False) -> None:
    """Give a run the machines that a cluster file has more than before; they are measured and planned with next."""
    output = Output(is_json=json)
    with live_run(run, home_of(home)) as live:
        wider = read_cluster(cluster)
        before = live.resolved
        new = check_wider(before.cluster, wider, before.name)
        default = before.home_root
        roots = {m.region: before.roots.get(m.region) or wider.storage.get(m.region, default) for m in wider.machines}
        at = next_iteration(live)
        fields = {"cluster": wider, "roots": roots, "reprofile_at": at}
        check_served(live.deployment, demand_entry(changed(before, **fields)), cluster)
        entry = rewritten(before, **fields)
        register(entry, live.home)
        wait_for_dag(live.api, entry)
        output.result(
            {"run": entry.run, "added": new, "from_iteration": at},
            f"Run {entry.run} has {', '.join(new)} too, measured and planned with from iteration {at} on.",
        )


def check_wider(before: Cluster, after: Cluster, run: str) -> list[str]:
    """Return the machines that a cluster has more than another one.

    Raises:
        InputError: a machine is missing or changed, or there is no new one.
    """
    found = {machine.name: machine for machine in after.machines}
    faults = [f"{machine.name} is missing" for machine in before.machines if machine.name not in found]
    faults += [f"{m.name} changed" for m in before.machines if m.name in found and found[m.name] != m]
    if after.machines[: len(before.machines)] != before.machines and not faults:
        faults.append("the machines are in another order")
    if faults:
        raise InputError(
            f"The cluster file does not go on from that of run {run}: {'; '.join(faults)}. A run keeps its machines; "
            f"take one out of use with `motley drain {run} MACHINE`, and add new ones at the end of the list."
        )
    new = [machine.name for machine in after.machines[len(before.machines) :]]
    if not new:
        raise InputError(f"The cluster file has no machine that run {run} does not have already.")
    return new


@app.command()
def replan(run: RunArgument, plan: PlanOption, home: HomeOption = None, json: JsonOption = False) -> None:
    """Place a run by hand: a plan file is in force from the next iteration that is not planned yet."""
    output = Output(is_json=json)
    with live_run(run, home_of(home)) as live:
        number, at = adopt_plan(live, plan)
        output.result(
            {"run": live.entry.run, "plan": number, "from_iteration": at},
            f"Run {live.entry.run} follows {plan} from iteration {at} on, as its plan {number}.",
        )


def adopt_plan(live: LiveRun, file: Path) -> tuple[int, int]:
    """Commit a plan for the next iteration; return its number and that iteration.

    Raises:
        InputError: an engine can't run it, or a drained machine would have work.
        PlanMismatchError, SpecError: it does not belong to, or does not fit, the run's cluster and job.
    """
    run, at = live.resolved, next_iteration(live)
    return commit_plan(run, plan_by_hand(file, run), at, "motley replan"), at


def next_iteration(live: LiveRun) -> int:
    """Return the first iteration that has not begun."""
    at_work = [run_iteration(item) for item in live.active_runs()]
    return max([live.head() or live.entry.first_iteration, *(k + 1 for k in at_work)])
