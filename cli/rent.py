"""`motley rent`: which of the machines on offer to rent for a job, and how to use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from cli.deployment import JsonOption
from cli.documents import JobOption, read_job, read_text, require_place, write_text
from cli.errors import InputError
from cli.output import Output
from cli.planner import CalibrationOption, ModelOption, chosen_model, chosen_planner, parse_budget
from cli.planner_view import explanation_view
from cli.tables import table
from plans.cost.model import CostMode
from plans.errors import SearchError, SolverUnavailableError
from plans.explain import explain
from plans.renting import OfferList, PlannedSet, Rental, load_offers, rent_for_throughput, rent_within_budget
from plans.spec.cluster import Cluster
from plans.spec.gpu_catalog import GPU_CATALOG
from plans.spec.job import Job
from plans.testbeds.document import commented_cluster
from plans.workflow import RlTask

app = typer.Typer()

OffersOption = Annotated[Path, typer.Option("--offers", "-f", help="Price list `motley.offers/1` (YAML or JSON).")]
MoneyOption = Annotated[float | None, typer.Option("--usd-per-hour", help="Budget: the most samples/s for it.")]
GoalOption = Annotated[float | None, typer.Option("--samples-per-s", help="Throughput: the least money for it.")]
MethodOption = Annotated[
    str, typer.Option("--method", "-m", help="Method of each plan; absent = areal-hex for async jobs, sha-ea for sync.")
]


@app.command("rent")
def rent_command(
    offers: OffersOption,
    job: JobOption,
    usd_per_hour: MoneyOption = None,
    samples_per_s: GoalOption = None,
    method: MethodOption = "",
    model: ModelOption = CostMode.CALIBRATED,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Limit of each plan's search: seconds (5s) or evaluations (300evals).")
    ] = "300evals",
    most_plans: Annotated[
        int | None,
        typer.Option("--most-plans", min=1, help="Sets to plan on; absent = 12 for a budget, 40 for a rate."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan document here.")] = None,
    cluster_out: Annotated[
        Path | None, typer.Option("--cluster-out", help="Write the rented machines here, as a cluster file.")
    ] = None,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
) -> None:
    """Choose which machines to rent for a job, and what each of them does.

    Give one goal: --usd-per-hour (the most throughput for the money), or
    --samples-per-s (the least money for the throughput). Whole machines are
    rented. Every set of them is estimated, the best ones are planned, and the
    plan of the best is shown.

    The price list names what is on offer; its links are a cluster file's:

    \b
      format: motley.offers/1
      name: my-offers
      offers:
      - name: fast
        region: east
        gpu: H800              # of the catalogue, or of gpu_types
        gpus_per_machine: 8
        machines: 4            # so many can be had
        usd_per_hour: 5.28     # of one GPU
        intra_gb_s: 200
      links:
        same_zone: {latency_ms: 0, bandwidth_gbps: 40}

    A budget that buys nothing on which the job fits says the least that would
    do; a throughput out of reach names the fastest set found (exit code 1).
    An offer without a price is bad input (exit code 2).

    Examples: motley rent --offers O.yaml --job J.yaml --usd-per-hour 90

        motley rent -f O.yaml -j J.yaml --samples-per-s 40 --out plan.json

        motley rent -f O.yaml -j J.yaml --usd-per-hour 90 --cluster-out C.yaml
    """  # noqa: D301 - typer reads the escape
    output = Output(is_json=json)
    goal, value, find = _goal(usd_per_hour, samples_per_s)
    listed, work = load_offers(read_text(offers), str(offers)), read_job(job)
    for file in (out, cluster_out):
        if file is not None:
            require_place(file)
    options: dict[str, Any] = {
        "model": chosen_model(model, calibration, sorted({*GPU_CATALOG, *listed.gpu_types})),
        "method": chosen_planner(method, work) if method else None,
        "budget": parse_budget(budget),
        "clock": time.monotonic,
        "on_planned": _follower(output, listed),
    }
    if most_plans is not None:
        options["most_plans"] = most_plans
    with _bad_input():
        rental = find(listed, work, value, **options)
    cluster = listed.cluster(rental.counts)
    if out is not None:
        write_text(out, rental.result.plan.to_json())
    if cluster_out is not None:
        head = [f"# Rented from {listed.name} for {work.name}: {rental.description}, {rental.usd_per_hour:.2f} $/h."]
        write_text(cluster_out, commented_cluster(cluster, head))
    if json:
        output.result(rental_document(listed, cluster, work, rental, {goal: value}), "")
    else:
        output.console.print(rental_view(listed, cluster, work, rental))
        for what, file in (("Plan", out), ("Cluster", cluster_out)):
            if file is not None:
                output.console.print(f"{what} written to {file}.", markup=False)


def gpu_roles(offers: OfferList, counts: tuple[int, ...], rental: Rental) -> list[tuple[int, int]]:
    """Return per offer how many of the rented GPUs generate, and how many do anything else."""
    owner = {
        f"{offer.name}-{index}": place
        for place, (offer, count) in enumerate(zip(offers.offers, counts, strict=True))
        for index in range(count)
    }
    tasks = rental.result.plan.tasks
    generating = set(tasks[RlTask.ACTOR_GENERATION].gpus)
    others = {gpu for task, placed in tasks.items() if task is not RlTask.ACTOR_GENERATION for gpu in placed.gpus}
    roles = [(0, 0)] * len(offers.offers)
    for gpus, step in ((generating, (1, 0)), (others, (0, 1))):
        for gpu in gpus:
            place = owner[gpu.rpartition("/")[0]]
            roles[place] = (roles[place][0] + step[0], roles[place][1] + step[1])
    return roles


def rental_document(
    offers: OfferList, cluster: Cluster, job: Job, rental: Rental, goal: dict[str, float]
) -> dict[str, Any]:
    """Return a rental as a JSON document; `plan` and `cluster` are documents that the other commands read."""
    return {
        "offers": offers.name,
        "job": job.name,
        "goal": goal,
        "usd_per_hour": rental.usd_per_hour,
        "samples_per_s": rental.throughput_samples_s,
        "usd_per_million_samples": rental.usd_per_million_samples,
        "rented": _rows(offers, rental),
        "considered": [
            {
                "machines": _named(offers, entry.counts),
                "usd_per_hour": entry.usd_per_hour,
                "samples_per_s": entry.throughput_samples_s,
            }
            for entry in rental.considered
        ],
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "plan": rental.result.plan.to_document(),
    }


def rental_view(offers: OfferList, cluster: Cluster, job: Job, rental: Rental) -> Group:
    """Return a rental as tables: what to rent, which sets were planned, how the best one is used."""
    columns = ("offer", "region", "gpu", "machines", "offered", "gpus", "usd_per_hour", "generating", "other_tasks")
    rented = table(
        f"Rent {rental.description}: {rental.usd_per_hour:.2f} $/h, {rental.throughput_samples_s:.4g} samples/s, "
        f"{rental.usd_per_million_samples:.4g} $ per million samples",
        columns,
        ([row[column] for column in columns] for row in _rows(offers, rental)),
    )
    ranked = sorted(rental.considered, key=lambda entry: -(entry.throughput_samples_s or 0.0))
    sets = table(
        f"Sets planned: {len(ranked)}",
        ("machines", "usd_per_hour", "samples_per_s"),
        ((offers.describe(e.counts), e.usd_per_hour, e.throughput_samples_s) for e in ranked),
    )
    use = explanation_view(explain(cluster, job, rental.result.plan, rental.result.report))
    return Group(rented, sets, Text("How they are used", style="bold"), use)


def _goal(usd_per_hour: float | None, samples_per_s: float | None) -> tuple[str, float, Callable[..., Rental]]:
    """Return the one goal: its name, its value, and what finds machines for it."""
    if usd_per_hour is not None and samples_per_s is None:
        return "usd_per_hour", usd_per_hour, rent_within_budget
    if samples_per_s is not None and usd_per_hour is None:
        return "samples_per_s", samples_per_s, rent_for_throughput
    raise InputError(
        "Renting has one goal, a budget or a throughput; give either --usd-per-hour or --samples-per-s, not both."
    )


def _rows(offers: OfferList, rental: Rental) -> list[dict[str, Any]]:
    roles = gpu_roles(offers, rental.counts, rental)
    return [
        {
            "offer": offer.name,
            "region": offer.region,
            "gpu": offer.gpu,
            "machines": count,
            "offered": offer.machines,
            "gpus": count * offer.gpus_per_machine,
            "usd_per_hour": count * offer.machine_usd_per_hour,
            "generating": generating,
            "other_tasks": others,
        }
        for offer, count, (generating, others) in zip(offers.offers, rental.counts, roles, strict=True)
        if count
    ]


def _named(offers: OfferList, counts: tuple[int, ...]) -> dict[str, int]:
    return {offer.name: count for offer, count in zip(offers.offers, counts, strict=True) if count}


def _follower(output: Output, offers: OfferList) -> Callable[[PlannedSet], None] | None:
    if not output.is_interactive:
        return None

    def show(entry: PlannedSet) -> None:
        rate = entry.throughput_samples_s
        reached = "no plan found" if rate is None else f"{rate:.4g} samples/s"
        output.progress(f"{offers.describe(entry.counts)}: {entry.usd_per_hour:.2f} $/h, {reached}")

    return show


@contextmanager
def _bad_input() -> Iterator[None]:
    """Goals and price lists that nothing can be found for are bad input (exit code 2)."""
    try:
        yield
    except SolverUnavailableError:
        raise
    except SearchError as error:
        raise InputError(str(error)) from error
