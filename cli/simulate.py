"""`motley simulate`: execute a plan in the discrete-event simulator."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from cli.deployment import JsonOption
from cli.documents import ClusterOption, JobOption, PlanOption, read_cluster, read_job, read_plan, read_text
from cli.errors import InputError
from cli.output import Output
from cli.tables import table
from plans.simulate import SimulationResult, SimulationSettings, simulate
from plans.simulate.settings import Dispatch
from plans.spec.cluster import Cluster

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
    picture: Annotated[Path | None, typer.Option(help="Write a Gantt picture (.svg or .png).")] = None,
    json: JsonOption = False,
) -> None:
    """Execute a plan event by event: random lengths, continuous batching, pipelines, shared links, staleness.

    The simulator shares no aggregation formula with the cost model, so it judges what `motley cost` predicts.

    Example: motley simulate --cluster C.yaml --job J.yaml --plan plan.json --iterations 5 --picture gantt.svg
    """
    output = Output(is_json=json)
    settings = SimulationSettings(
        iterations=iterations, seed=seed, dispatch=dispatch, lengths=None if lengths is None else read_lengths(lengths)
    )
    site = read_cluster(cluster)
    result = simulate(site, read_job(job), read_plan(plan), settings)
    if picture is not None:
        from cli.pictures.gantt import draw_gantt

        draw_gantt(result, site, picture)
    if json:
        output.result(result.to_document(), "")
    else:
        output.console.print(_report(result, site))


def read_lengths(file: Path) -> tuple[int, ...]:
    """Return the response lengths of a file: whitespace-separated whole numbers, or a JSON list.

    Raises:
        InputError: something in it is no whole number.
    """
    text = read_text(file)
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    bad = [word for word in words if not word.isdigit()]
    if bad or not words:
        what = f"{json_module.dumps(bad[0])} (and {len(bad) - 1} more)" if bad else "nothing"
        raise InputError(f"{file} holds {what}; response lengths are whole numbers >= 1, one per line or a JSON list.")
    return tuple(int(word) for word in words)


def _report(result: SimulationResult, cluster: Cluster) -> Group:
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
    return Group(iterations, busy, lags)
