"""Stage infer: rewards and, where the loss needs them, reference log-probs, as column families beside the rollouts.

The machine that sampled a shard scores it; reference log-probs are computed where the plan places the reference policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.engines.protocol import ScoredTokens
from stages.generate import run_prompts
from stages.policy_files import policy_at_home
from stages.prompts import Prompts
from stages.reward_shards import reward_shards
from stages.rollout_shards import Shard, find_in_regions
from stages.sharding import local_replicas, shard_ranges, shards_by_replica
from storage.documents import fingerprint
from storage.errors import ObjectMissingError
from storage.layout import Split
from storage.manifest import Manifest
from storage.rollout_schema import Family
from storage.rollouts import write_family


def run_stage(context: StageContext) -> StageOutcome:
    """Score this machine's shards."""
    prompts = run_prompts(context)
    num_shards = len(shard_ranges(context.job.prompts_per_iteration, context.job.prompts_per_shard))
    mine = _local_shards(context, RlTask.ACTOR_GENERATION, num_shards)
    rollouts = _rollouts(context, mine)
    rewards = reward_shards(context, rollouts, _rows_by_id(context, prompts), num_shards, Split.TRAIN)
    manifests, num_reused = list(rewards.manifests), rewards.num_reused
    metrics: dict[str, JsonValue] = {
        "num_shards": len(mine),
        "num_reused_shards": rewards.num_reused,
        "reward_status": dict(rewards.num_by_status),
        "reward_mean": rewards.mean,
    }
    if context.job.needs_reference:
        scored = _reference(context, num_shards)
        manifests += [manifest for manifest, _ in scored]
        num_reused += sum(is_reused for _, is_reused in scored)
        metrics["num_reference_shards"] = len(scored)
    return StageOutcome(
        reused=bool(manifests) and num_reused == len(manifests),
        artefacts=tuple(manifest.key for manifest in manifests),
        metrics=metrics,
    )


def _rows_by_id(context: StageContext, prompts: Prompts) -> Mapping[str, Any]:
    job = context.job
    rows = prompts.of_iteration(job.data.seed, context.iteration, job.prompts_per_iteration)
    return {prompt.row.prompt_id: prompt.row for prompt in rows}


def _local_shards(context: StageContext, task: RlTask, num_shards: int) -> list[int]:
    placed = context.plan.tasks[task]
    dealt = shards_by_replica(num_shards, [replica.samples for replica in placed.replicas])
    return [shard for replica in local_replicas(placed, context.machine.name) for shard in dealt[replica]]


def _rollouts(context: StageContext, shards: Sequence[int]) -> list[Shard]:
    found = [find_in_regions(context, context.iteration, shard, Family.ROLLOUTS) for shard in shards]
    missing = [str(shard) for shard, entry in zip(shards, found, strict=True) if entry is None]
    if missing:
        raise ObjectMissingError(
            f"run {context.run.name}, iteration {context.iteration}: rollout shards {', '.join(missing)} are not "
            "committed; repeat stage generate."
        )
    return [entry for entry in found if entry is not None]


def _reference(context: StageContext, num_shards: int) -> list[tuple[Manifest, bool]]:
    """Score shards under policy version 0, the reference policy."""
    placed = context.plan.tasks[RlTask.REFERENCE_INFERENCE]
    policy = policy_at_home(context, 0)
    dealt = shards_by_replica(num_shards, [replica.samples for replica in placed.replicas])
    done: list[tuple[Manifest, bool]] = []
    for replica in local_replicas(placed, context.machine.name):
        engine = None
        for shard in _rollouts(context, dealt[replica]):
            index = int(shard.manifest.metadata["shard"])
            wanted = fingerprint("reference", shard.manifest.content_digest, policy.weights_hash)
            standing = find_in_regions(context, context.iteration, index, Family.REFERENCE, input_fingerprint=wanted)
            if standing is not None:
                done.append((standing.manifest, True))
                continue
            if engine is None:
                with context.phase("engines"):
                    engine = context.engines.reference(replica, policy)
            rows = shard.rows(Family.ROLLOUTS, ("row_id", "prompt_token_ids", "completion_token_ids", "temperature"))
            with context.phase("reference"):
                scores = engine.score([_scored_tokens(row) for row in rows])
            done.append((_write_reference(context, shard, index, num_shards, rows, scores, wanted), False))
    return done


def _scored_tokens(row: Mapping[str, Any]) -> ScoredTokens:
    return ScoredTokens(
        prompt_token_ids=row["prompt_token_ids"],
        completion_token_ids=row["completion_token_ids"],
        temperature=row["temperature"],
    )


def _write_reference(
    context: StageContext,
    shard: Shard,
    index: int,
    num_shards: int,
    rows: Sequence[Mapping[str, Any]],
    scores: Sequence[Sequence[float]],
    wanted: str,
) -> Manifest:
    weights_hash = policy_at_home(context, 0).weights_hash
    columns = [
        {"row_id": row["row_id"], "reference_logprobs": list(score), "reference_weights_hash": weights_hash}
        for row, score in zip(rows, scores, strict=True)
    ]
    return write_family(
        shard.store, context.run.name, context.iteration, Family.REFERENCE, index, num_shards, columns,
        input_fingerprint=wanted, created_by=context.created_by, attempt=context.request.attempt,
    )  # fmt: skip
