"""`motley rollouts rescore`: what other rewards would have said of the completions of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_checks import engines_python
from cli.deployment_record import read_record
from cli.documents import read_text
from cli.errors import CommandError, InputError
from cli.output import Output
from cli.run_lookup import find_run
from cli.runs import RunArgument
from cli.tables import table
from stages.errors import ContractError, StageError
from stages.rescore_process import RescoreProcess, RescoreRequest
from storage.layout import Split, rescored_folder

COLUMNS = ("iteration", "rows", "scored", "before", "after", "changed")


def rescore(
    run: RunArgument,
    rewards: Annotated[
        Path, typer.Option("--rewards", "-r", help="YAML or JSON: a job file's section `rewards`, or a whole job file.")
    ],
    to: Annotated[
        str | None, typer.Option("--to", help="Folder or URL; files run=R/iteration=K/rescored.parquet in it.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Instead of --to: keep the scores with the run, under this name.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="First iteration (split eval: policy version).")] = 0,
    last: Annotated[int | None, typer.Option(min=0, help="Last iteration; default: the newest.")] = None,
    split: Annotated[Split, typer.Option(help="Trained on, or evaluation.")] = Split.TRAIN,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Score the completions of a run again with other rewards; the run itself stays as it is.

    The result has the old reward (reward_before) beside the new one, per completion.

    Example: motley rollouts rescore quickstart --rewards strict.yaml --to /data/strict, then in DuckDB
    SELECT * FROM read_parquet('/data/strict/**/*.parquet', hive_partitioning = true) WHERE reward <> reward_before
    """
    output, place = Output(is_json=json), home_of(home)
    found = find_run(run, place)
    request = _request(
        root=found.store.url, run=found.name, rewards=_section(rewards), name=name, split=split, first=first, last=last,
        target=to if to is None or "://" in to else str(Path(to).absolute()),
    )  # fmt: skip
    record = read_record(place.deployment_file)
    python = engines_python(os.environ, record.engines_python if record else None)
    rows = _scored(python, request, output)
    target = request.target or f"{request.root}/{rescored_folder(request.run, str(name), split)}"
    title = f"Rewards of {found.name} ({split}), means before and after"
    if json:
        output.result({"run": found.name, "target": target, "iterations": rows}, "")
        return
    output.console.print(table(title, COLUMNS, [[row[name] for name in COLUMNS] for row in rows]))
    output.console.print(f"Written to {target}.", markup=False)


def _section(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise InputError(f"{file} is neither YAML nor JSON: {' '.join(str(error).split())}.") from error
    section = document.get("rewards", document) if isinstance(document, dict) else None
    if not isinstance(section, dict):
        raise InputError(f"{file} has no section `rewards`; write one as a job file has it (terms: [...]).")
    return section


def _scored(python: str, request: RescoreRequest, output: Output) -> list[dict[str, Any]]:
    """Score, and return a row for each iteration."""
    rows = []
    try:
        with RescoreProcess(python, request, os.environ) as process:
            for row in process.results():
                rows.append(row)
                output.progress(f"iteration {row['iteration']}: {row['rows']} rows scored")
    except ContractError as error:
        raise InputError(str(error)) from error
    except StageError as error:
        raise CommandError(str(error)) from error
    return rows


def _request(**facts: Any) -> RescoreRequest:  # noqa: ANN401 - fields of the request
    try:
        return RescoreRequest.model_validate(facts)
    except ValidationError as error:
        faults = "; ".join(str(fault["msg"]).removeprefix("Value error, ") for fault in error.errors())
        raise InputError(f"Nothing can be scored: {faults}.") from error
