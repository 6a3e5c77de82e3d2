"""Plans that a person wrote: checked against a run, and committed as one of its plans."""

from __future__ import annotations

from pathlib import Path

from cli.documents import read_plan
from cli.errors import InputError
from plans.plan import Plan, check_plan
from stages.engine_limits import engine_limits, machines_without_address
from stages.plan_history import committed_plans, with_adoption
from stages.runs import ResolvedRun
from storage.runs import write_plan
from storage.store import open_store

METHOD = "by-hand"
"""Method of such a plan in its document."""


def plan_by_hand(file: Path, run: ResolvedRun) -> Plan:
    """Return the plan of a file, which the run's engines and machines can follow.

    Raises:
        InputError: an engine can't run it, or a drained machine would have work.
        PlanMismatchError, SpecError: it does not belong to, or does not fit, the run's cluster and job.
    """
    plan = read_plan(file)
    check_plan(plan, run.cluster, run.job.planner, source_name=str(file))
    limits = engine_limits(run.job, run.cluster)
    faults = limits.faults(plan, run.cluster.view)
    if any("one machine" in fault for fault in faults) and (unreachable := machines_without_address(run.cluster)):
        faults.append(f"training spreads only where all machines have an address, {', '.join(unreachable)} has none")
    used = {gpu.rpartition("/")[0] for placed in plan.tasks.values() for gpu in placed.gpus}
    faults += [f"machine {name} is drained" for name in run.drained if name in used]
    if faults:
        raise InputError(f"{file} asks for what can't be done: {'; '.join(faults)}.")
    search = type(plan.search).model_validate({**plan.search.model_dump(), "drained": list(run.drained)})
    return plan.model_copy(update={"method": METHOD, "search": search})


def commit_plan(run: ResolvedRun, plan: Plan, iteration: int, command: str) -> int:
    """Make a plan the run's newest, in force from an iteration on, and return its number.

    Args:
        run: The run; its record is in its home store.
        plan: The plan.
        iteration: First iteration that follows it.
        command: Command that it came with.
    """
    store = open_store(run.home_root)
    number = len(committed_plans(store, run.name))
    write_plan(store, run.name, number, with_adoption(plan, iteration, f"by hand ({command})").to_document())
    return number
