"""One number per completion token from an engine, committed as a column family: reference log-probs, critic values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.engines.protocol import ScoredTokens
from stages.inference_shards import dealt_shards, num_shards_of, rollouts_of
from stages.rollout_shards import find_in_regions
from storage.documents import fingerprint
from storage.manifest import Manifest
from storage.rollout_schema import Family
from storage.rollouts import write_family

Score = Callable[[Sequence[ScoredTokens]], list[list[float]]]
"""Rows to one number per completion token, [rows][completion tokens]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScoring:
    """What is computed for every rollout."""

    task: RlTask
    """Task of the plan; its replicas share the shards."""
    family: Family
    """Where the numbers go."""
    column: str
    """Column of the numbers."""
    constants: Mapping[str, Any]
    """Columns that are the same in every row, e.g. the hash of the weights."""
    weights_hash: str
    """Hash of the model's tensors; part of what decides whether a standing shard is kept."""
    open_engine: Callable[[int], Score]
    """Makes the engine of a replica ready; called only where something is missing."""


def score_tokens(context: StageContext, scoring: TokenScoring) -> StageOutcome:
    """Score this machine's shards; committed numbers of the same rollouts and weights are kept."""
    num_shards = num_shards_of(context)
    done: list[tuple[Manifest, bool]] = []
    for replica, shards in dealt_shards(context, scoring.task, num_shards).items():
        score: Score | None = None
        for shard in rollouts_of(context, shards):
            index = int(shard.manifest.metadata["shard"])
            wanted = fingerprint(scoring.family.value, shard.manifest.content_digest, scoring.weights_hash)
            standing = find_in_regions(context, context.iteration, index, scoring.family, input_fingerprint=wanted)
            if standing is not None:
                done.append((standing.manifest, True))
                continue
            if score is None:
                with context.phase("engines"):
                    score = scoring.open_engine(replica)
            rows = shard.rows(Family.ROLLOUTS, ("row_id", "prompt_token_ids", "completion_token_ids", "temperature"))
            with context.phase(scoring.family.value):
                numbers = score([_scored_tokens(row) for row in rows])
            columns = [
                {"row_id": row["row_id"], scoring.column: list(values), **scoring.constants}
                for row, values in zip(rows, numbers, strict=True)
            ]
            manifest = write_family(
                shard.store, context.run.name, context.iteration, scoring.family, index, num_shards, columns,
                input_fingerprint=wanted, created_by=context.created_by, attempt=context.request.attempt,
            )  # fmt: skip
            done.append((manifest, False))
    return StageOutcome(
        reused=bool(done) and all(is_reused for _, is_reused in done),
        artefacts=tuple(manifest.key for manifest, _ in done),
        metrics={f"num_{scoring.family.value}_shards": len(done)},
    )


def _scored_tokens(row: Mapping[str, Any]) -> ScoredTokens:
    return ScoredTokens(
        prompt_token_ids=row["prompt_token_ids"],
        completion_token_ids=row["completion_token_ids"],
        temperature=row["temperature"],
    )
