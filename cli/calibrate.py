"""`motley calibrate`: coefficients of the calibrated cost model from the measured times of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.documents import write_text
from cli.errors import RunFailedError
from cli.output import Output
from cli.run_lookup import RUN_HELP, find_run
from cli.tables import table
from plans.cost import Calibration, TaskTime, errors_of, fit_times
from plans.spec.load import cluster_from_document
from plans.workflow import RlTask
from stages.contract import StageName
from stages.plan_history import numbered_plan
from stages.spec.job import training_job_from_document
from storage.iterations import find_records
from storage.rollout_schema import Family
from storage.runs import IterationRecord, load_run
from storage.store import Store

app = typer.Typer()

WORK: Final[Mapping[RlTask, Sequence[tuple[StageName, str]]]] = {
    RlTask.ACTOR_GENERATION: [(StageName.GENERATE, "generate")],
    RlTask.REFERENCE_INFERENCE: [
        (StageName.INFER, Family.REFERENCE),
        (StageName.REFERENCE_INFERENCE, Family.REFERENCE),
    ],
    RlTask.CRITIC_INFERENCE: [(StageName.CRITIC_INFERENCE, Family.VALUES)],
    RlTask.ACTOR_TRAINING: [(StageName.TRAIN, "train")],
    RlTask.CRITIC_TRAINING: [(StageName.CRITIC_TRAINING, "train")],
}
"""Stage and phase in which an engine does a task's work: what the model prices, without starts, reads and commits.
Scoring with rules is no inference, so the reward task is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    iteration: int
    time: TaskTime


@app.command()
def calibrate(
    run: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the coefficients here (JSON), for `--calibration`.")
    ] = None,
    skip: Annotated[
        int, typer.Option("--skip", min=0, help="Iterations to leave out at the run's begin: engines warm up in them.")
    ] = 1,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Fit the cost model's coefficients to the measured times of a run.

    Shows each task's measured seconds beside the model's before and after. Tasks that the run didn't do, and what its
    plans can't tell apart, stay near the built-in values.

    Examples: motley calibrate quickstart --out measured.json

        motley plan -c C.yaml -j J.yaml --calibration measured.json
    """
    output = Output(is_json=json)
    found = find_run(run, home_of(home))
    record = load_run(found.store, found.name)
    cluster = cluster_from_document(record.cluster, f"{found.name}/run.json cluster")
    job = training_job_from_document(record.job, f"{found.name}/run.json job").planner
    measured = list(_measured(found.store, found.name, find_records(found.store, found.name)[skip:]))
    if not measured:
        raise RunFailedError(
            f"Run {found.name} has no measured time behind its first {skip} iteration(s); let it do more, or lower "
            "--skip."
        )
    times = [one.time for one in measured]
    fitted, after = fit_times(cluster, job, times, name=f"run {found.name}")
    rows = _rows(measured, errors_of(cluster, job, times, Calibration()), after)
    if out is not None:
        write_text(out, fitted.model_dump_json(indent=1) + "\n")
    if json:
        output.result({"calibration": fitted.model_dump(mode="json"), "tasks": rows}, "")
        return
    columns = ("task", "iterations", "measured_s", "built_in_s", "fitted_s")
    output.console.print(
        table(f"Seconds per iteration, medians of {found.name}", columns, [[r[c] for c in columns] for r in rows])
    )
    output.console.print(table("Coefficients", ("of", "built-in", "fitted"), _coefficients(fitted)))
    if out is not None:
        output.console.print(f"Coefficients written to {out}; use them with --calibration {out}.", markup=False)


def _measured(store: Store, run: str, records: Sequence[IterationRecord]) -> Iterator[_Measured]:
    for record in records:
        if record.plan is None:
            continue
        plan = numbered_plan(store, run, record.plan).plan
        phases: Mapping[str, Mapping[str, float]] = record.metadata.get("phases_s", {})
        for task in plan.tasks:
            seconds = sum(phases.get(stage.value, {}).get(str(phase), 0.0) for stage, phase in WORK.get(task, ()))
            if seconds > 0.0:
                yield _Measured(iteration=record.iteration, time=TaskTime(plan=plan, task=task, measured_s=seconds))


def _rows(measured: Sequence[_Measured], before: Sequence[float], after: Sequence[float]) -> list[dict[str, Any]]:
    """Return a row for each task: medians over the iterations."""
    order = list(RlTask)
    joined = sorted(zip(measured, before, after, strict=True), key=lambda row: order.index(row[0].time.task))
    rows = []
    for task, group in groupby(joined, key=lambda row: row[0].time.task):
        found = list(group)
        seconds = [one.time.measured_s for one, _, _ in found]
        rows.append(
            {
                "task": task.value,
                "iterations": len(found),
                "measured_s": median(seconds),
                "built_in_s": median(s * (1.0 + error) for s, (_, error, _) in zip(seconds, found, strict=True)),
                "fitted_s": median(s * (1.0 + error) for s, (_, _, error) in zip(seconds, found, strict=True)),
            }
        )
    return rows


def _coefficients(fitted: Calibration) -> list[list[Any]]:
    built_in = Calibration()
    rows: list[list[Any]] = []
    for gpu, of_type in fitted.gpu_types.items():
        usual = built_in.of(gpu)
        for kind, value in of_type.compute.model_dump().items():
            rows.append([f"{gpu}: share of FLOP/s, {kind}", usual.compute.model_dump()[kind], value])
        rows.append([f"{gpu}: share of memory bandwidth", usual.hbm, of_type.hbm])
    for name, value in fitted.links.model_dump().items():
        rows.append([f"links {name.replace('_', ' ')}: share of bandwidth", built_in.links.model_dump()[name], value])
    return [row for row in rows if row[1] != row[2]]
