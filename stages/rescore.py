"""Score committed completions again, with other rewards: `python -m stages.rescore --request FILE`.

What the run was trained on stays as it is. The new scores are plain Parquet beside the old ones, one file per
iteration, partitioned by run and iteration as an export is. Scoring again gives the same files. A process of its own in
the engines' environment (`stages.rescore_process` starts it); it prints one JSON line per iteration and exits like a
stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from stages.data.dataset import load_dataset
from stages.data.rows import PromptRow
from stages.data.spec import DataSpec
from stages.errors import ContractError, DataError, SpecFaultsError, StageError
from stages.rescore_process import BAD_INPUT, RescoreRequest
from stages.rewards.protocol import RewardResult, ScoringItem
from stages.rewards.registry import reward_faults
from stages.rewards.spec import RewardsSpec
from stages.rewards.summary import check_verifiers_work
from stages.runs import load_run
from stages.verifiers import may_call_python, open_pool
from storage.errors import InvalidInputError, StorageError
from storage.exports import partition_key
from storage.iterations import find_iterations, find_shards
from storage.layout import RESCORED_NAME, rescored_folder
from storage.parquet_io import encode_table
from storage.parsed_keys import parse_key
from storage.regional_view import run_stores, view_of
from storage.rollout_schema import Family, FinishReason
from storage.rollouts import has_rollouts, read_rollouts
from storage.scores import ScoresRecord, claim_scores
from storage.store import Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa

_KEPT: Final = ("row_id", "prompt_id", "sample_index", "completion_text", "gold_answer", "finish_reason")
_SCORED: Final = ("reward", "reward_status")


def rescore(request: RescoreRequest) -> Iterator[dict[str, Any]]:
    """Score the iterations one after the other; yield what each one came to.

    Yields:
        `iteration`, `rows`, `before` and `after` (mean reward, null without one), `changed` (rows whose reward or
        status is another), `scored` (rows with a reward now) and `file` (key in the target).

    Raises:
        SpecFaultsError: faults of the reward section, all of them.
        ContractError: no such run, iterations that are not done, or the dataset lacks prompts that were sampled.
        InvalidInputError: scores of other rewards lie at the target, or the name can't be a name.
        DataError: the dataset can't be read.
        RewardError: the verifiers can't be set up, or failed on every completion.
    """
    rewards = _rewards(request.rewards)
    job, home = load_run(request.root, request.run).job, open_store(request.root)
    target, folder = _place(request, home)
    store = view_of(run_stores(home, request.run))
    if rewards.reward_model is not None:
        raise SpecFaultsError("rewards", ["reward_model needs the engines of a run; only rules can score again."])
    iterations = _iterations(store, request)
    prompts = _prompts(job.data)
    record = ScoresRecord(run=request.run, split=request.split, rewards=rewards.model_dump(mode="json"))
    with open_pool(rewards) as pool:
        for iteration in iterations:
            table = _read(store, request, iteration)
            results = pool.score(_items(table, prompts, request.run))
            check_verifiers_work(results)
            claim_scores(target, folder, record)
            key = f"{folder}/{partition_key(request.run, iteration, RESCORED_NAME)}".removeprefix("/")
            target.publish(key, encode_table(_with_scores(table, results)))
            yield {"iteration": iteration, **_summary(table, results), "file": key}


def _place(request: RescoreRequest, home: Store) -> tuple[Store, str]:
    """Return the store of the results and the folder in it."""
    if request.name is not None:
        return home, rescored_folder(request.run, request.name, request.split)
    return open_store(str(request.target)), ""


def _rewards(section: Mapping[str, Any]) -> RewardsSpec:
    try:
        rewards = RewardsSpec.model_validate(section)
    except ValidationError as error:
        faults = [f"rewards.{'.'.join(map(str, fault['loc']))}: {fault['msg']}." for fault in error.errors()]
        raise SpecFaultsError("rewards", faults) from error
    if faults := reward_faults(rewards, allow_python_callables=may_call_python()):
        raise SpecFaultsError("rewards", faults)
    return rewards


def _iterations(store: Store, request: RescoreRequest) -> list[int]:
    """Return the iterations to score, all of whose rollouts are committed."""
    run, split = request.run, request.split
    shards = find_shards(store, run, Family.ROLLOUTS, split, find_iterations(store, run))
    there = sorted({number for shard in shards if (number := parse_key(shard.key).number) is not None})
    last = request.last if request.last is not None else max(there, default=0)
    wanted = [k for k in there if request.first <= k <= last]
    missing = sorted(set(range(request.first, last + 1)) - set(there)) if request.last is not None else []
    if missing or not wanted:
        span = f"{there[0]} to {there[-1]}" if there else "none"
        named = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise ContractError(
            f"run {run} has no complete rollouts ({split}) of iteration(s) {named or request.first} (yet); there are: "
            f"{span}. Score those, and the others when they are done.",
            run=run,
        )
    return wanted


def _prompts(data: DataSpec) -> dict[str, PromptRow]:
    loaded = load_dataset(data)
    return {row.prompt_id: row for part in (loaded.train, loaded.held_out) for row in part.rows}


def _read(store: Store, request: RescoreRequest, iteration: int) -> pa.Table:
    is_scored = has_rollouts(store, request.run, iteration, Family.REWARD, request.split)
    families = (Family.REWARD,) if is_scored else ()
    columns = (*_KEPT, *(_SCORED if is_scored else ()))
    table = read_rollouts(
        store, request.run, iteration, columns=columns, families=families, split=request.split, is_complete=False
    )
    return table.rename_columns([f"{name}_before" if name in _SCORED else name for name in table.column_names])


def _items(table: pa.Table, prompts: Mapping[str, PromptRow], run: str) -> list[ScoringItem]:
    unknown = sorted(set(table.column("prompt_id").to_pylist()) - prompts.keys())
    if unknown:
        raise ContractError(
            f"run {run}: {len(unknown)} sampled prompts are not in the dataset, first {unknown[0]}; it has changed "
            "since: restore it.",
            run=run,
        )
    return [
        ScoringItem(
            row=prompts[row["prompt_id"]],
            text=row["completion_text"] or "",
            finish_reason=FinishReason(row["finish_reason"]),
        )
        for row in table.select(["prompt_id", "completion_text", "finish_reason"]).to_pylist()
    ]


def _with_scores(table: pa.Table, results: Sequence[RewardResult]) -> pa.Table:
    import pyarrow as pa

    columns = {
        "reward": pa.array([result.value for result in results], pa.float64()),
        "reward_status": pa.array([result.status.value for result in results], pa.string()),
        "reward_parts": pa.array(
            [list(result.parts.items()) for result in results], pa.map_(pa.string(), pa.float64())
        ),
        "parsed_answer": pa.array([result.parsed for result in results], pa.string()),
        "reward_error": pa.array([result.error for result in results], pa.string()),
    }
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def _summary(table: pa.Table, results: Sequence[RewardResult]) -> dict[str, Any]:
    num = table.num_rows
    has_before = "reward_before" in table.column_names
    before = table.column("reward_before").to_pylist() if has_before else [None] * num
    status = table.column("reward_status_before").to_pylist() if has_before else [None] * num
    after = [result.value for result in results]
    changed = sum(
        (old, was) != (result.value, result.status.value)
        for old, was, result in zip(before, status, results, strict=True)
    )
    return {
        "rows": num,
        "before": _mean(before),
        "after": _mean(after),
        "changed": changed if has_before else None,
        "scored": sum(value is not None for value in after),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def main() -> int:
    """Score, print a line per iteration; 0 done, 1 failed, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m stages.rescore")
    parser.add_argument("--request", type=Path, required=True)
    try:
        request = RescoreRequest.model_validate_json(parser.parse_args().request.read_bytes())
        for done in rescore(request):
            sys.stdout.write(json.dumps(done) + "\n")
            sys.stdout.flush()
    except SpecFaultsError as error:
        sys.stderr.writelines(f"{fault}\n" for fault in error.faults)
        return BAD_INPUT
    except (StageError, StorageError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT if isinstance(error, ContractError | DataError | InvalidInputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
