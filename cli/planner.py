"""`motley plan`, `motley cost`, `motley compare`: search placements, price them, put methods side by side."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from cli.deployment import JsonOption
from cli.documents import (
    ClusterOption,
    JobOption,
    PlanOption,
    read_cluster,
    read_job,
    read_plan,
    read_text,
    require_place,
    write_text,
)
from cli.errors import CommandError, InputError
from cli.output import Output
from cli.pictures.canvas import require_picture
from cli.planner_view import SearchView, explanation_view
from cli.tables import table
from plans.cost import CostModel, load_calibration, price
from plans.cost.model import CostMode
from plans.cost.report import CostReport
from plans.errors import InfeasibleError, PlanMismatchError, SearchError
from plans.explain import explain
from plans.plan import check_plan
from plans.search.budget import Budget
from plans.search.planner import DEFAULT_METHOD, METHODS, MethodError, PlanResult, find_planner, make_plan
from plans.search.protocol import Planner
from plans.spec.cluster import Cluster
from plans.spec.cluster_rules import gpu_type_names
from plans.spec.job import Job, Mode
from plans.testbeds.document import cluster_yaml
from plans.testbeds.registry import find_testbed, testbed_names
from plans.testbeds.testbed import UnknownTestbedError

app = typer.Typer()

_METHOD_HELP = "Search method: " + "; ".join(f"{name} = {entry.summary}" for name, entry in METHODS.items()) + "."
ModelOption = Annotated[
    CostMode, typer.Option("--model", help="paper = HetRL's published formulas; calibrated = with corrections.")
]
CalibrationOption = Annotated[
    Path | None, typer.Option("--calibration", help="Coefficients for the calibrated model (YAML or JSON).")
]
BudgetOption = Annotated[
    str, typer.Option("--budget", "-b", help="Seconds (30s, 2min) or evaluations (5000evals, repeatable).")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the search.")]
WorkersOption = Annotated[
    int,
    typer.Option("--workers", "-w", min=0, help="Processes; 0 = one per core. With evaluations the plan is the same."),
]


@app.command("plan")
def plan_command(
    cluster: ClusterOption,
    job: JobOption,
    method: Annotated[str, typer.Option("--method", "-m", help=_METHOD_HELP)] = DEFAULT_METHOD,
    model: ModelOption = CostMode.CALIBRATED,
    budget: BudgetOption = "10s",
    seed: SeedOption = 0,
    workers: WorkersOption = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan document here.")] = None,
    start: Annotated[Path | None, typer.Option("--start", help="A plan to start from; the result is no worse.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw machines, links and tasks (.svg, .png).")
    ] = None,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
) -> None:
    """Search a placement of a job on a cluster, and explain it.

    Ctrl-C ends the search and returns the best plan so far.

    Examples: motley plan --cluster C.yaml --job J.yaml

        motley plan -c C.yaml -j J.yaml --budget 60s --workers 0 --out plan.json --picture plan.svg

        motley plan -c C.yaml -j J.yaml --method verl --model paper --budget 5000evals --json
    """
    output = Output(is_json=json)
    site, work = read_cluster(cluster), read_job(job)
    limit = parse_budget(budget)
    cost_model = chosen_model(model, calibration, gpu_type_names(site))
    for check, file in ((require_place, out), (require_picture, picture)):
        if file is not None:
            check(file)
    warm_start = None if start is None else read_plan(start)
    planner = chosen_planner(method, work)
    if warm_start is not None:
        with _bad_input():
            check_plan(warm_start, site, work, source_name=str(start))
    with SearchView(output, method) as view, _interrupt_flag() as interrupted, _bad_input():
        result = make_plan(
            site,
            work,
            planner,
            cost_model,
            limit,
            seed,
            workers or os.cpu_count() or 1,
            time.monotonic,
            view.update,
            lambda: interrupted[0],
            warm_start,
        )
    if out is not None:
        write_text(out, result.plan.to_json())
    if picture is not None:
        from cli.pictures.topology import draw_topology

        draw_topology(site, result.plan, picture)
    if json:
        output.result(result.plan.to_document(), "")
    else:
        output.console.print(explanation_view(explain(site, work, result.plan, result.report)))
        if out is not None:
            output.console.print(f"Plan written to {out}.", markup=False)


@app.command("cost")
def cost_command(
    cluster: ClusterOption,
    job: JobOption,
    plan: PlanOption,
    model: ModelOption = CostMode.CALIBRATED,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
) -> None:
    """Price a given plan: seconds by phase and task, memory per GPU, money.

    A plan that exceeds a memory is priced too; `feasible` and `violations` say so, and the exit code is 1.

    Example: motley cost --cluster C.yaml --job J.yaml --plan plan.json --model paper --json
    """
    output = Output(is_json=json)
    site, work, placement = read_cluster(cluster), read_job(job), read_plan(plan)
    with _bad_input():
        cost_model = chosen_model(model, calibration, gpu_type_names(site))
        report = price(site, work, placement, cost_model, source_name=str(plan))
    if json:
        output.result(report.to_document(), "")
    else:
        output.console.print(explanation_view(explain(site, work, placement, report)))
    refuse_infeasible(plan, report)


@app.command("compare")
def compare_command(
    cluster: ClusterOption,
    job: JobOption,
    methods: Annotated[
        str, typer.Option("--methods", help="Comma-separated methods; absent = all that plan this job.")
    ] = "",
    model: ModelOption = CostMode.CALIBRATED,
    budget: BudgetOption = "10s",
    seed: SeedOption = 0,
    workers: WorkersOption = 1,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
) -> None:
    """Plan with several methods under one cost model and budget; one table with ratios to the best.

    A method that finds nothing is a row with its reason. The exit code is 1 when no method finds a plan.

    Example: motley compare --cluster C.yaml --job J.yaml --methods sha-ea,verl,deap --budget 30s
    """
    output = Output(is_json=json)
    site, work = read_cluster(cluster), read_job(job)
    limit, cost_model = parse_budget(budget), chosen_model(model, calibration, gpu_type_names(site))
    names = _methods(methods, work)
    results: dict[str, PlanResult | str] = {}
    for name in names:
        with SearchView(output, name) as view, _interrupt_flag() as interrupted:
            results[name] = _attempt(
                site, work, name, cost_model, limit, seed, workers or os.cpu_count() or 1, view, interrupted
            )
    found = {name: entry for name, entry in results.items() if isinstance(entry, PlanResult)}
    best = min((entry.iteration_s for entry in found.values()), default=None)
    rows = [_compare_row(name, entry, best) for name, entry in results.items()]
    if json:
        output.result({"budget": budget, "model": model.value, "seed": seed, "methods": rows}, "")
    else:
        columns = ("method", "iteration_s", "ratio_to_best", "evaluations", "wall_s", "optimal", "note")
        output.console.print(table(f"{work.name} on {site.name}", columns, ([row[c] for c in columns] for row in rows)))
    if best is None:
        raise CommandError(f"No method found a plan: {rows[0]['note']}")


@app.command("testbed", hidden=True)
def print_testbed(
    name: Annotated[str, typer.Argument(help="Name; absent = list all names.")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the file here.")] = None,
) -> None:
    """Print the cluster file of a published testbed or of a scaling study (`scaling-N`)."""
    output = Output(is_json=False)
    if not name:
        output.console.print("\n".join(testbed_names()), markup=False)
        return
    try:
        text = cluster_yaml(find_testbed(name))
    except UnknownTestbedError as error:
        raise InputError(str(error)) from error
    if out is None:
        output.console.print(text, markup=False, end="")
    else:
        write_text(out, text)


def register(whole: typer.Typer) -> None:
    """Add the planner's commands to the command line."""
    whole.add_typer(app)


def chosen_planner(method: str, work: Job) -> Planner:
    """Return a method's planner; one that does not exist or does not plan the job is bad input."""
    with _bad_input():
        return find_planner(method, work)


def _attempt(
    site: Cluster,
    work: Job,
    name: str,
    model: CostModel,
    limit: Budget,
    seed: int,
    workers: int,
    view: SearchView,
    interrupted: list[bool],
) -> PlanResult | str:
    """Return a method's plan, or why it has none."""
    try:
        return make_plan(
            site, work, name, model, limit, seed, workers, time.monotonic, view.update, lambda: interrupted[0]
        )
    except (InfeasibleError, SearchError) as error:
        return str(error)


def _compare_row(name: str, entry: PlanResult | str, best: float | None) -> dict[str, object]:
    if isinstance(entry, str):
        nothing = dict.fromkeys(("iteration_s", "ratio_to_best", "evaluations", "wall_s", "optimal"))
        return {"method": name, **nothing, "note": entry}
    ratio = entry.iteration_s / best if best else None
    search = entry.search
    return {
        "method": name,
        "iteration_s": entry.iteration_s,
        "ratio_to_best": ratio,
        "evaluations": search.evaluations,
        "wall_s": search.wall_s,
        "optimal": search.optimal,
        "note": search.termination or "",
    }


def _methods(text: str, work: Job) -> list[str]:
    if not text:
        is_async = work.mode is Mode.ASYNC
        return [name for name, entry in METHODS.items() if is_async or not entry.is_async_only]
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    with _bad_input():
        for name in names:
            find_planner(name, work)
    if not names:
        raise InputError("--methods names no method; write for example --methods sha-ea,verl.")
    return names


def parse_budget(text: str) -> Budget:
    """Return the budget of an option; an unreadable one is bad input."""
    try:
        return Budget.parse(text)
    except SearchError as error:
        raise InputError(str(error)) from error


def chosen_model(mode: CostMode, calibration: Path | None, types: Sequence[str]) -> CostModel:
    """Return the cost model that two options name; contradictory options are bad input.

    Args:
        mode: which model.
        calibration: its coefficients.
        types: GPU types that they may name.
    """
    if mode is CostMode.PAPER:
        if calibration is not None:
            raise InputError("--calibration belongs to --model calibrated; the paper's formulas have no coefficients.")
        return CostModel.paper()
    if calibration is None:
        return CostModel.calibrated()
    return CostModel.calibrated(load_calibration(read_text(calibration), str(calibration), types))


def refuse_infeasible(plan: Path, report: CostReport) -> None:
    """Refuse a plan that exceeds a memory or needs a forbidden link.

    Raises:
        CommandError: it does.
    """
    if not report.feasible:
        raise CommandError(f"{plan} cannot run on this cluster: {'; '.join(report.violations[:5])}.")


@contextmanager
def _bad_input() -> Iterator[None]:
    """Errors of the caller's choice of files and methods are bad input (exit code 2)."""
    try:
        yield
    except (MethodError, PlanMismatchError) as error:
        raise InputError(str(error)) from error


@contextmanager
def _interrupt_flag() -> Iterator[list[bool]]:
    """Turn Ctrl-C into a flag while a search runs; a second Ctrl-C interrupts as usual."""
    flag = [False]

    def raise_flag(_number: int, _frame: FrameType | None) -> None:
        if flag[0]:
            raise KeyboardInterrupt
        flag[0] = True

    previous = signal.signal(signal.SIGINT, raise_flag)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
