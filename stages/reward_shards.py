"""Rewards of committed rollout shards, as the column family `reward` beside them; used by infer and evaluate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from stages.context import StageContext
from stages.data.rows import PromptRow
from stages.errors import ContractError
from stages.reward_model import TOKEN_COLUMNS, RewardModel
from stages.rewards.protocol import RewardResult, ScoringItem
from stages.rewards.summary import check_verifiers_work
from stages.rollout_shards import Shard
from stages.verifiers import open_pool
from storage.documents import fingerprint
from storage.layout import Split
from storage.manifest import Manifest
from storage.parsed_keys import parse_key
from storage.rollout_schema import Family, FinishReason
from storage.rollouts import find_shard, write_family

_COLUMNS = ("row_id", "prompt_id", "completion_text", "finish_reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredShards:
    """What was scored."""

    manifests: Sequence[Manifest]
    """Manifests of the reward shards, in the order of the rollout shards."""
    num_reused: int
    """Shards that an earlier attempt had scored."""
    num_by_status: Mapping[str, int]
    """Rows per status, over all of these shards."""
    mean: float | None
    """Mean of the rewards there are; None when there is none."""
    num_valued: int
    """Rows with a reward."""


def reward_shards(
    context: StageContext,
    rollouts: Sequence[Shard],
    rows: Mapping[str, PromptRow],
    num_shards: int,
    split: Split,
    *,
    model: RewardModel | None = None,
) -> ScoredShards:
    """Score every completion of the shards; committed scores of the same rollouts and rewards are kept.

    Args:
        context: The stage.
        rollouts: Shards to score.
        rows: Dataset rows by prompt id.
        num_shards: Shards of the whole batch.
        split: Train or eval.
        model: The job's reward model; None = rules only.

    Raises:
        RewardError: the verifiers can't be set up, or failed on every completion.
        ContractError: rollouts of prompts that the dataset does not have.
    """
    wanted = {shard.manifest.key: _input_fingerprint(context, shard, model) for shard in rollouts}
    standing = {shard.manifest.key: _find(context, shard, split, wanted[shard.manifest.key]) for shard in rollouts}
    manifests = {key: manifest for key, manifest in standing.items() if manifest is not None}
    num_reused = len(manifests)
    missing = [shard for shard in rollouts if shard.manifest.key not in manifests]
    if missing:
        with context.phase("rewards"):
            scored = _score(context, missing, rows, model)
        with context.phase("commit"):
            for shard, columns in zip(missing, scored, strict=True):
                manifests[shard.manifest.key] = _write(
                    context, shard, columns, num_shards, split, wanted[shard.manifest.key]
                )
    ordered = [manifests[shard.manifest.key] for shard in rollouts]
    stored = [
        row
        for shard, manifest in zip(rollouts, ordered, strict=True)
        for row in Shard(shard.store, manifest).rows(Family.REWARD, ("row_id", "reward", "reward_status"))
    ]
    values = [row["reward"] for row in stored if row["reward"] is not None]
    return ScoredShards(
        manifests=ordered,
        num_reused=num_reused,
        num_by_status=dict(sorted(Counter(row["reward_status"] for row in stored).items())),
        mean=sum(values) / len(values) if values else None,
        num_valued=len(values),
    )


def _input_fingerprint(context: StageContext, shard: Shard, model: RewardModel | None) -> str:
    rewards = context.job.rewards.model_dump(mode="json", exclude={"num_verifier_processes"})
    weights = [] if model is None else [model.weights_hash]
    return fingerprint("reward", shard.manifest.content_digest, rewards, *weights)


def _find(context: StageContext, shard: Shard, split: Split, wanted: str) -> Manifest | None:
    return find_shard(
        shard.store,
        context.run.name,
        _number_of(shard),
        int(shard.manifest.metadata["shard"]),
        input_fingerprint=wanted,
        family=Family.REWARD,
        split=split,
    )


def _number_of(shard: Shard) -> int:
    """Return the iteration (or evaluated version) in the key of a shard."""
    return int(parse_key(shard.manifest.key).number or 0)


def _score(
    context: StageContext, shards: Sequence[Shard], rows: Mapping[str, PromptRow], model: RewardModel | None
) -> list[list[dict[str, Any]]]:
    token_columns = () if model is None else TOKEN_COLUMNS
    stored = [shard.rows(Family.ROLLOUTS, (*_COLUMNS, *token_columns)) for shard in shards]
    unknown = sorted({row["prompt_id"] for part in stored for row in part} - rows.keys())
    if unknown:
        raise ContractError(
            f"run {context.run.name}: rollouts of {len(unknown)} prompts that the dataset does not have, first "
            f"{unknown[0]}; the dataset has changed since they were sampled: restore it, or start a new run."
        )
    items = [
        ScoringItem(
            row=rows[row["prompt_id"]],
            text=row["completion_text"],
            finish_reason=FinishReason(row["finish_reason"]),
        )
        for part in stored
        for row in part
    ]
    start = context.clock.monotonic()
    with open_pool(context.job.rewards) as pool:
        results = pool.score(items)
    per_row_s = (context.clock.monotonic() - start) / max(1, len(items))
    check_verifiers_work(results)
    if model is not None:
        results = model.added(results, [row for part in stored for row in part])
    verifier = _verifier_name(context, model)
    position, columns = 0, []
    for part in stored:
        found = results[position : position + len(part)]
        position += len(part)
        columns.append([_columns(row, result, verifier, per_row_s) for row, result in zip(part, found, strict=True)])
    return columns


def _columns(row: Mapping[str, Any], result: RewardResult, verifier: str, seconds: float) -> dict[str, Any]:
    return {
        "row_id": row["row_id"],
        "reward": result.value,
        "reward_status": result.status.value,
        "reward_parts": list(result.parts.items()),
        "verifier": verifier,
        "parsed_answer": result.parsed,
        "reward_error": result.error,
        "reward_s": seconds,
    }


def _verifier_name(context: StageContext, model: RewardModel | None) -> str:
    models = [] if model is None else [f"reward_model {model.weights_hash[:12]}"]
    names = "+".join([*(term.key for term in context.job.rewards.terms), *models])
    if any(term.name == "math_verify" for term in context.job.rewards.terms):
        return f"{names} (math-verify {version('math-verify')})"
    return names


def _write(
    context: StageContext,
    shard: Shard,
    columns: Sequence[Mapping[str, Any]],
    num_shards: int,
    split: Split,
    wanted: str,
) -> Manifest:
    return write_family(
        shard.store, context.run.name, _number_of(shard), Family.REWARD, int(shard.manifest.metadata["shard"]),
        num_shards, columns, input_fingerprint=wanted, created_by=context.created_by,
        split=split, attempt=context.request.attempt,
    )  # fmt: skip
