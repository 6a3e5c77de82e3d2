"""`motley simulate`: execute a plan in the discrete-event simulator."""

from __future__ import annotations

import json as json_module
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from cli.deployment import JsonOption
from cli.documents import ClusterOption, JobOption, PlanOption, read_cluster, read_job, read_plan, read_text
from cli.errors import InputError
from cli.output import Output
from cli.pictures.canvas import require_picture
from cli.planner import CalibrationOption, ModelOption, chosen_model, refuse_infeasible
from cli.tables import table
from plans.cost import CostModel, price
from plans.cost.model import CostMode
from plans.simulate import Efficiency, SimulationResult, SimulationSettings, simulate
from plans.simulate.settings import Dispatch, Failure, Straggler
from plans.spec.cluster import Cluster
from plans.spec.cluster_rules import gpu_type_names
from plans.workflow import TaskKind

app = typer.Typer()


@app.command("simulate")
def simulate_plan(
    cluster: ClusterOption,
    job: JobOption,
    plan: PlanOption,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations to complete.")] = 3,
    lengths: Annotated[
        Path | None, typer.Option(help="Observed response lengths: one number per line, or a JSON list.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the response lengths.")] = 0,
    dispatch: Annotated[
        Dispatch, typer.Option(help="Fixed shares per replica, one queue for all, or shares by length (buckets).")
    ] = Dispatch.PLANNED,
    model: ModelOption = CostMode.CALIBRATED,
    calibration: CalibrationOption = None,
    straggler: Annotated[
        list[str] | None, typer.Option(help="A slow GPU, as va-0/3=1.5 (times slower); repeatable.")
    ] = None,
    outage: Annotated[
        list[str] | None,
        typer.Option(help="A machine that is away, as va-0@120+60 (from second 120 for 60 s); repeatable."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a Gantt picture (.svg or .png).")] = None,
    json: JsonOption = False,
) -> None:
    """Execute a plan event by event: random lengths, continuous batching, pipelines, shared links, staleness.

    The simulator shares no formula with the cost model, so it judges what `motley cost` predicts. Hardware reaches the
    shares of its peak that the same --model and --calibration of `motley cost` say; with --model paper its peak.

    Examples: motley simulate --cluster C.yaml --job J.yaml --plan plan.json --iterations 5 --picture gantt.svg

        motley simulate -c C.yaml -j J.yaml -p plan.json --straggler va-0/3=1.5 --outage va-1@120+60
    """
    output = Output(is_json=json)
    site, work, placement = read_cluster(cluster), read_job(job), read_plan(plan)
    cost_model = chosen_model(model, calibration, gpu_type_names(site))
    if picture is not None:
        require_picture(picture)
    settings = SimulationSettings(
        iterations=iterations,
        seed=seed,
        dispatch=dispatch,
        lengths=None if lengths is None else read_lengths(lengths),
        efficiency=efficiencies(site, cost_model),
        stragglers=tuple(map(straggler_of, straggler or ())),
        failures=tuple(map(outage_of, outage or ())),
    )
    report = price(site, work, placement, cost_model, source_name=str(plan))
    refuse_infeasible(plan, report)
    result = simulate(site, work, placement, settings, source_name=str(plan))
    if picture is not None:
        from cli.pictures.gantt import draw_gantt

        draw_gantt(result, site, picture)
    if json:
        output.result(result.to_document() | {"model": model.value, "predicted_iteration_s": report.iteration_s}, "")
    else:
        output.console.print(_report(result, site, model, report.iteration_s))


def read_lengths(file: Path) -> tuple[int, ...]:
    """Return the response lengths of a file: whitespace-separated whole numbers, or a JSON list.

    Raises:
        InputError: something in it is no whole number >= 1.
    """
    text = read_text(file)
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    bad = [word for word in words if not (word.isascii() and word.isdigit() and int(word) >= 1)]
    if bad or not words:
        what = f"{json_module.dumps(bad[0])} (and {len(bad) - 1} more)" if bad else "nothing"
        raise InputError(f"{file} holds {what}; response lengths are whole numbers >= 1, one per line or a JSON list.")
    return tuple(int(word) for word in words)


def straggler_of(text: str) -> Straggler:
    """Return the slow GPU that an option describes; raises InputError for anything else."""
    gpu, equals, factor = text.rpartition("=")
    try:
        slowdown = float(factor) if equals else float("nan")
    except ValueError:
        slowdown = float("nan")
    if not slowdown >= 1:
        raise InputError(f"--straggler is {text!r}, but it is GPU=FACTOR with a factor >= 1; write va-0/3=1.5.")
    return Straggler(gpu=gpu, slowdown=slowdown)


def outage_of(text: str) -> Failure:
    """Return the outage that an option describes; raises InputError for anything else."""
    found = re.fullmatch(r"(.+)@([0-9.]+)\+([0-9.]+)", text)
    try:
        machine, at_s, down_s = (found[1], float(found[2]), float(found[3])) if found else ("", -1.0, -1.0)
    except ValueError:
        at_s = -1.0
    if at_s < 0:
        raise InputError(f"--outage is {text!r}, but it is MACHINE@START+SECONDS with numbers >= 0; write va-0@120+60.")
    return Failure(machine=machine, at_s=at_s, down_s=down_s)


def efficiencies(cluster: Cluster, model: CostModel) -> dict[str, Efficiency]:
    """Return what each GPU type of a cluster reaches of its peak under a cost model's coefficients."""
    if model.is_paper:
        return {}
    links = model.calibration.links
    found = {}
    for name in sorted({machine.gpu for machine in cluster.machines}):
        of_type = model.calibration.of(name)
        found[name] = Efficiency(
            compute_by_kind={kind: of_type.compute.of(kind) for kind in TaskKind},
            hbm=of_type.hbm,
            network=links.within_machine,
            network_between=links.between_machines,
            decode_layer_overhead_s=of_type.decode_layer_overhead_s,
        )
    return found


def _report(result: SimulationResult, cluster: Cluster, model: CostMode, predicted_s: float | None) -> Group:
    iterations = table(
        f"{result.steady_iteration_s:.4g} s per iteration, {result.throughput_tokens_s:.4g} tokens/s",
        ("iteration", "seconds"),
        list(enumerate(result.iteration_s)),
    )
    by_machine = [
        (machine.name, machine.gpu, sum(used) / len(used))
        for machine in cluster.machines
        if (used := [result.utilisation[gpu] for gpu in machine.gpu_ids if gpu in result.utilisation])
    ]
    busy = table("Busy share of the GPUs used", ("machine", "type", "busy"), by_machine)
    total = sum(result.staleness.values())
    lags = table(
        f"Staleness (generation waited {result.producer_wait_s:.4g} s, training {result.consumer_wait_s:.4g} s)",
        ("lag", "samples", "share"),
        [(lag, count, count / total) for lag, count in sorted(result.staleness.items())],
    )
    predicted = Text(f"The {model.value} cost model says {predicted_s:.4g} s per iteration." if predicted_s else "")
    lost = [Text(f"Outages ended {result.lost_work} pieces of work.")] if result.lost_work else []
    return Group(iterations, busy, lags, *lost, predicted)
