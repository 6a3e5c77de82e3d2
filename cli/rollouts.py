"""`motley rollouts ls / show / stats / sql / export / rescore / prune`: the completions that a run was trained on."""

from __future__ import annotations

import csv
import json as json_module
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from cli.deployment import HomeOption, JsonOption, home_of
from cli.errors import CommandError, InputError
from cli.output import Output
from cli.prune import prune
from cli.rescore import rescore
from cli.run_lookup import find_run
from cli.runs import RunArgument
from cli.tables import table
from stages.home import HOME_VARIABLE
from stages.redaction import deployed_redactor
from storage.exports import ExportFormat, export_rollouts
from storage.layout import Split
from storage.removed_rollouts import removal_sentence
from storage.rollout_queries import first_prompt, group_rows, rows_of
from storage.sql import connect
from storage.store import open_store

app = typer.Typer(no_args_is_help=True, help="Look into the completions of a run.")
app.command()(rescore)
app.command()(prune)

SplitOption = Annotated[Split, typer.Option(help="Trained on, or evaluation (iteration = policy version).")]

LIST_QUERY = """
SELECT iteration, count(*) AS rows, count(DISTINCT prompt_id) AS prompts, count(DISTINCT shard) AS shards,
       min(policy_version_first) AS policy, max(policy_version_last) AS "to",
       sum(len(completion_token_ids)) AS tokens, avg(reward) AS reward, count(*) - count(reward) AS unscored
FROM completions WHERE split = ? GROUP BY iteration ORDER BY iteration
"""

STATS_QUERY = """
SELECT iteration, count(*) AS rows, avg(reward) AS reward, stddev_samp(reward) AS std,
       avg(len(completion_token_ids)) AS tokens, quantile_cont(len(completion_token_ids), 0.95) AS p95,
       avg((finish_reason = 'length')::int) AS cut, sum((reward_status = 'ok')::int) AS ok,
       sum((reward_status = 'unparsable')::int) AS unparsable, sum((reward_status = 'truncated')::int) AS truncated,
       sum((reward_status IN ('timed_out', 'crashed'))::int) AS failed, avg(is_dropped::int) AS dropped,
       avg(staleness) AS lag, max(logprob_gap_max) AS gap
FROM completions WHERE split = ? GROUP BY iteration ORDER BY iteration
"""


@app.command("ls")
def list_rollouts(
    run: RunArgument, split: SplitOption = Split.TRAIN, home: HomeOption = None, json: JsonOption = False
) -> None:
    """List the iterations that have rollouts, with row counts, policy versions and mean reward."""
    _print_query(run, LIST_QUERY, split, f"Rollouts of {run} ({split})", home, json=json)


@app.command()
def stats(
    run: RunArgument, split: SplitOption = Split.TRAIN, home: HomeOption = None, json: JsonOption = False
) -> None:
    """Show rewards, lengths, statuses, drops and staleness by iteration.

    tokens and p95: completion length; cut: share that hit the length limit; ok to failed: reward statuses; dropped:
    share left out of training; lag: mean staleness in policy versions; gap: largest trainer-sampler log-prob gap,
    nats.
    """
    _print_query(run, STATS_QUERY, split, f"Statistics of {run} ({split})", home, json=json)


@app.command("show")
def show_group(
    run: RunArgument,
    iteration: Annotated[int, typer.Option(min=0, help="Iteration (split eval: policy version).")] = 0,
    prompt: Annotated[str | None, typer.Option(help="Prompt id; default: the iteration's first prompt.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Choose the prompt with the lowest mean reward.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print token ids with the sampler's log-probs.")] = False,
    split: SplitOption = Split.TRAIN,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Show one prompt with all its completions: text, reward, status, advantage, log-probs.

    Example: motley rollouts show quickstart --iteration 3 --worst
    """
    output = Output(is_json=json)
    found = find_run(run, home_of(home))
    with connect(found.rows_store(), found.name, [iteration]) as connection, _readable(found.name):
        chosen = prompt or first_prompt(connection, iteration, split, is_worst=worst)
        rows = group_rows(connection, iteration, split, chosen) if chosen else []
    if not rows:
        sentence = removal_sentence(found.store, found.name, iteration) if split is Split.TRAIN else None
        if sentence is not None:
            raise InputError(f"{sentence[0].upper()}{sentence[1:]}.")
        what = f"prompt {prompt!r}" if prompt else "rollouts"
        raise InputError(
            f"Iteration {iteration} of {found.name} has no {what} ({split}); see `motley rollouts ls {run}`."
        )
    if json:
        output.result({"rows": rows}, "")
        return
    for part in _group_text(rows, is_with_tokens=tokens):
        output.console.print(part)


@app.command()
def sql(
    run: RunArgument,
    query: Annotated[str, typer.Argument(help="DuckDB query over the views named below.")],
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the answer to a CSV file; - for standard output.")
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Query a run with SQL (DuckDB). Data is read from Parquet through the manifests, only the columns needed.

    Views: completions (all below joined), rollouts, rewards, reference, critic_values, training, iterations, metrics.

    Example: motley rollouts sql quickstart "SELECT split, iteration, avg(reward) FROM completions GROUP BY ALL"
    """
    import duckdb

    output = Output(is_json=json)
    found = find_run(run, home_of(home))
    with connect(found.rows_store(), found.name) as connection:
        try:
            rows = rows_of(connection, query)
        except duckdb.Error as error:
            raise InputError(
                f"DuckDB refuses the query: {str(error).splitlines()[0]}. If the query is right, `motley verify {run}` "
                "says whether data is damaged."
            ) from error
    columns = list(rows[0]) if rows else []
    if csv_file is not None:
        _write_csv(csv_file, columns, rows)
    elif json:
        output.result({"columns": columns, "rows": rows}, "")
    else:
        output.console.print(table(f"{len(rows)} row(s)", columns, [list(row.values()) for row in rows]))


@app.command()
def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="Folder or URL that the files go to.")],
    form: Annotated[
        ExportFormat,
        typer.Option("--format", help="parquet: hive-partitioned; jsonl: JSON lines; hf: for datasets.load_dataset."),
    ] = ExportFormat.PARQUET,
    split: SplitOption = Split.TRAIN,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Write plain files for other tools: one per iteration, all columns joined, redacted as the deployment says.

    parquet: run=R/iteration=K/completions.parquet; jsonl: R/SPLIT/iteration-K.jsonl; hf: R/README.md and R/data.

    Example: motley rollouts export quickstart --to /data/rl, then in DuckDB
    SELECT * FROM read_parquet('/data/rl/**/*.parquet', hive_partitioning = true)
    """
    output, place = Output(is_json=json), home_of(home)
    found = find_run(run, place)
    redactor = deployed_redactor({**os.environ, HOME_VARIABLE: str(place.path)})
    target = open_store(to if "://" in to else str(Path(to).absolute()))
    redact = None if redactor is None else redactor.table
    files = export_rollouts(found.rows_store(), found.name, target, split=split, form=form, redact=redact)
    rows = [{"iteration": file.iteration, "rows": file.rows, "file": file.key} for file in files]
    text = f"{sum(file.rows for file in files)} rows of {len(files)} iteration(s) written to {target.url}"
    output.result({"run": found.name, "target": target.url, "files": rows}, text)


@contextmanager
def _readable(run: str) -> Iterator[None]:
    """Turn what DuckDB says of damaged files into a sentence; for queries that are known to be right.

    Raises:
        CommandError: rows can't be read.
    """
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise CommandError(
            f"Rows of run {run} can't be read ({str(error).splitlines()[0]}); `motley verify {run}` names what is "
            "damaged."
        ) from error


def _print_query(run: str, query: str, split: Split, title: str, home: Path | None, *, json: bool) -> None:
    output = Output(is_json=json)
    found = find_run(run, home_of(home))
    with connect(found.rows_store(), found.name) as connection, _readable(found.name):
        rows = rows_of(connection, query, [split.value])
    if json:
        output.result({"run": found.name, "split": split.value, "iterations": rows}, "")
    elif rows:
        output.console.print(table(title, list(rows[0]), [list(row.values()) for row in rows]))
    else:
        output.result({}, f"Run {found.name} has no committed rollouts of split {split} yet.")


def _group_text(rows: Sequence[dict[str, Any]], *, is_with_tokens: bool) -> list[Text]:
    first = rows[0]
    parts = [
        Text(f"{first['prompt_id']}  iteration {first['iteration']}  group {first['group_id']}", style="bold"),
        Text(
            f"policy version {first['policy_version_first']}, temperature {first['temperature']:g}, {first['engine']}"
        ),
        Text("prompt: ", style="cyan").append(repr(first["prompt_text"]), style="default"),
        Text("gold answer: ", style="cyan").append(str(first["gold_answer"]), style="default"),
    ]
    for row in rows:
        reward = row["reward"]
        style = "green" if reward is not None and reward > 0 else "red" if reward is not None else "yellow"
        said = f"{reward:g}" if reward is not None else row["reward_status"] or "not scored"
        head = (
            f"[{row['sample_index']}] reward {said}, {len(row['completion_token_ids'])} tokens, {row['finish_reason']}"
        )
        if row["advantage"] is not None:
            head += f", advantage {row['advantage']:+.3f}"
        if row["is_dropped"]:
            head += f", dropped: {row['dropped_reason']}"
        parts += [Text(head, style=style), Text("    " + (row["completion_text"] or ""))]
        if is_with_tokens:
            pairs = zip(row["completion_token_ids"], row["sampler_logprobs"], strict=True)
            parts.append(Text("    " + "  ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs), style="dim"))
    return parts


def _write_csv(file: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    def text(value: Any) -> Any:  # noqa: ANN401 - lists and maps become JSON text
        return json_module.dumps(value) if isinstance(value, list | dict) else value

    stream = sys.stdout if str(file) == "-" else file.open("w", newline="", encoding="utf-8")
    try:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows([text(value) for value in row.values()] for row in rows)
    finally:
        if stream is not sys.stdout:
            stream.close()
