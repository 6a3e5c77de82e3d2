"""Score committed completions again, with other rewards: `python -m stages.rescore --request FILE`.

What the run was trained on stays as it is. The new scores are plain Parquet beside the old ones, one file per
iteration, partitioned by run and iteration as an export is. A process of its own in the engines' environment, where the
verifiers' libraries are; it prints one JSON line per iteration and exits like a stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.data.dataset import load_dataset
from stages.data.rows import PromptRow
from stages.data.spec import DataSpec
from stages.errors import ContractError, DataError, SpecFaultsError, StageError
from stages.rewards.protocol import RewardResult, ScoringItem
from stages.rewards.registry import reward_faults
from stages.rewards.spec import RewardsSpec
from stages.rewards.summary import check_verifiers_work
from stages.runs import load_run
from stages.verifiers import may_call_python, open_pool
from storage.errors import StorageError
from storage.exports import partition_key
from storage.iterations import find_iterations
from storage.layout import Split
from storage.parquet_io import encode_table
from storage.regional_view import run_stores, view_of
from storage.rollout_schema import Family, FinishReason
from storage.rollouts import has_rollouts, read_rollouts
from storage.store import Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa

FILE_NAME: Final = "rescored.parquet"
"""File of one iteration."""

_KEPT: Final = ("row_id", "prompt_id", "sample_index", "completion_text", "gold_answer", "finish_reason")
_SCORED: Final = ("reward", "reward_status")


class RescoreRequest(BaseModel):
    """What is scored, with what, and where the scores go."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    root: str
    """Root of the run's home store."""
    run: str
    """Run name."""
    rewards: dict[str, Any]
    """Section `rewards`, as a job file has it."""
    target: str
    """Root of the results."""
    split: Split = Split.TRAIN
    """Train or eval."""
    first: int = Field(default=0, ge=0)
    """First iteration (split eval: policy version)."""
    last: int | None = Field(default=None, ge=0)
    """Last iteration; null = the newest that there is."""


def rescore(request: RescoreRequest) -> Iterator[dict[str, Any]]:
    """Score the iterations one after the other; yield what each one came to.

    Yields:
        `iteration`, `rows`, `before` and `after` (mean reward, null without one), `changed` (rows whose reward or
        status is another), `scored` (rows with a reward now) and `file` (key in the target).

    Raises:
        SpecFaultsError: faults of the reward section, all of them.
        ContractError: no such run, no such iterations, or the dataset lacks prompts that were sampled.
        DataError: the dataset can't be read.
        RewardError: the verifiers can't be set up, or failed on every completion.
    """
    rewards = _rewards(request.rewards)
    job, target = load_run(request.root, request.run).job, open_store(request.target)
    store = view_of(run_stores(open_store(request.root), request.run))
    if rewards.reward_model is not None:
        raise SpecFaultsError("rewards", ["reward_model needs the engines of a run; only rules can score again."])
    iterations = _iterations(store, request)
    prompts = _prompts(job.data)
    with open_pool(rewards) as pool:
        for iteration in iterations:
            table = _read(store, request, iteration)
            results = pool.score(_items(table, prompts, request.run))
            check_verifiers_work(results)
            key = partition_key(request.run, iteration, FILE_NAME)
            target.publish(key, encode_table(_with_scores(table, results)))
            yield {"iteration": iteration, **_summary(table, results), "file": key}


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
    there = [k for k in find_iterations(store, request.run) if has_rollouts(store, request.run, k, split=request.split)]
    last = request.last if request.last is not None else max(there, default=0)
    wanted = [k for k in there if request.first <= k <= last]
    missing = sorted(set(range(request.first, last + 1)) - set(there)) if request.last is not None else []
    if missing or not wanted:
        span = f"{there[0]} to {there[-1]}" if there else "none"
        raise ContractError(
            f"run {request.run} has no committed rollouts ({request.split}) of iteration(s) "
            f"{', '.join(map(str, missing[:5])) or request.first}; there are: {span}.",
            run=request.run,
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
        return 2
    except (StageError, StorageError) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ContractError | DataError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
