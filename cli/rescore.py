"""`motley rollouts rescore`: what other rewards would have said of the completions of a run."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_checks import engines_python
from cli.deployment_record import read_record
from cli.documents import read_text
from cli.errors import CommandError, InputError
from cli.output import Output
from cli.run_lookup import find_run
from cli.runs import RunArgument
from cli.tables import table
from storage.layout import Split

COLUMNS = ("iteration", "rows", "scored", "before", "after", "changed")


def rescore(
    run: RunArgument,
    rewards: Annotated[
        Path, typer.Option("--rewards", "-r", help="YAML or JSON: a job file's section `rewards`, or a whole job file.")
    ],
    to: Annotated[str, typer.Option("--to", help="Folder or URL; files run=R/iteration=K/rescored.parquet in it.")],
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
    request = {
        "root": found.store.url,
        "run": found.name,
        "rewards": _section(rewards),
        "target": to if "://" in to else str(Path(to).absolute()),
        "split": split.value,
        "first": first,
        "last": last,
    }
    record = read_record(place.deployment_file)
    python = engines_python(os.environ, record.engines_python if record else None)
    rows = _run(python, request, output)
    title = f"Rewards of {found.name} ({split}), means before and after"
    if json:
        output.result({"run": found.name, "target": request["target"], "iterations": rows}, "")
        return
    output.console.print(table(title, COLUMNS, [[row[name] for name in COLUMNS] for row in rows]))
    output.console.print(f"Written to {request['target']}.", markup=False)


def _section(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise InputError(f"{file} is neither YAML nor JSON: {' '.join(str(error).split())}.") from error
    section = document.get("rewards", document) if isinstance(document, dict) else None
    if not isinstance(section, dict):
        raise InputError(f"{file} has no section `rewards`; write one as a job file has it (terms: [...]).")
    return section


def _run(python: str, request: dict[str, Any], output: Output) -> list[dict[str, Any]]:
    """Score in the engines' environment, whose libraries the verifiers need; return a row for each iteration."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="motley-rescore-") as folder:
        file, errors = Path(folder) / "request.json", Path(folder) / "errors.txt"
        file.write_text(json_module.dumps(request), encoding="utf-8")
        command = [python, "-m", "stages.rescore", "--request", str(file)]
        # Not in the user's folder: a module that is found there only would be missing in the stages.
        with (
            errors.open("w", encoding="utf-8") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/") as process,
        ):
            for line in process.stdout or ():
                rows.append(json_module.loads(line))
                output.progress(f"iteration {rows[-1]['iteration']}: {rows[-1]['rows']} rows scored")
        said = errors.read_text(encoding="utf-8").strip()
    if process.returncode != 0:
        message = said or f"Scoring ended with exit code {process.returncode}."
        raise (InputError if process.returncode == InputError.exit_code else CommandError)(message)
    return rows
