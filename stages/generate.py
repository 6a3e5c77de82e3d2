"""Stage generate: this machine's rollout shards of an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import JsonValue

from stages.context import StageContext, StageOutcome
from stages.errors import StaleRolloutError
from stages.policy_files import policy_at_home, policy_directory
from stages.prompts import Prompts, open_prompts
from stages.sampling import SampledShards, sample_shards, shard_keys
from stages.shard_writer import RolloutBatch
from storage.layout import Split
from storage.policies import head_version

if TYPE_CHECKING:
    from storage.policies import Policy


def run_stage(context: StageContext) -> StageOutcome:
    """Sample the shards that the plan gives this machine; shards that stand already are kept."""
    k, job = context.iteration, context.job
    policy = sampling_policy(context)
    prompts = run_prompts(context)
    batch = RolloutBatch(
        split=Split.TRAIN,
        number=k,
        prompts=prompts.of_iteration(job.data.seed, k, job.planner.batch.prompts),
        samples_per_prompt=job.responses_per_prompt,
        temperature=job.sampling.temperature,
        top_p=job.sampling.top_p,
        top_k=job.sampling.top_k,
        oldest_version=oldest_version(k, job.max_staleness),
        newest_version=k,
    )
    context.log("sample", version=policy.version, prompts=len(batch.prompts))
    sampled = sample_shards(context, batch, prompts, policy)
    return StageOutcome(
        reused=bool(sampled.manifests) and sampled.num_reused == len(sampled.manifests),
        artefacts=tuple(shard_keys(sampled)),
        metrics=sampling_metrics(sampled, policy),
    )


def oldest_version(iteration: int, max_staleness: int) -> int:
    """Return the least policy version whose rollouts may be trained on at iteration k, which trains from version k."""
    return max(0, iteration - max_staleness)


def sampling_policy(context: StageContext) -> Policy:
    """Return the newest committed policy version that may sample for this iteration.

    Raises:
        StaleRolloutError: none is committed yet; the gate in front of this stage was passed too early.
    """
    k, oldest = context.iteration, oldest_version(context.iteration, context.job.max_staleness)
    head = head_version(context.home, context.run.name)
    if head is None or head < oldest:
        raise StaleRolloutError(
            f"run {context.run.name}: iteration {k} is sampled from policy version {oldest} or later, but the newest "
            f"committed one is {head}; commit the earlier iterations first (max_staleness is "
            f"{context.job.max_staleness}).",
            head=head,
            oldest=oldest,
        )
    # An iteration that is repeated later must not sample from a policy that has learned from it.
    return policy_at_home(context, min(head, k))


def run_prompts(context: StageContext) -> Prompts:
    """Return the run's encoded prompts, made with the tokenizer of policy version 0."""
    directory = policy_directory(context, policy_at_home(context, 0))
    with context.phase("prompts"):
        return open_prompts(context.job, directory, context.state_dir / "cache" / context.run.name, context.deadline)


def sampling_metrics(sampled: SampledShards, policy: Policy) -> dict[str, JsonValue]:
    """Return the numbers of a sampling stage."""
    stats = sampled.stats
    seconds = stats["engine_s"]
    metrics: dict[str, JsonValue] = {
        "policy_version": policy.version,
        "weights_hash": policy.weights_hash,
        "num_shards": len(sampled.manifests),
        "num_shards_all_machines": sampled.num_shards,
        "num_reused_shards": sampled.num_reused,
        "rows": stats["rows"],
        "tokens": stats["tokens"],
        "truncated": stats["truncated"],
        "engine_s": seconds,
        "tokens_per_s": stats["tokens"] / seconds if seconds > 0 else None,
    }
    if sampled.info is not None:
        metrics["engine"] = f"{sampled.info.name} {sampled.info.version}"
        metrics["guarantee"] = (
            "same tokens for every placement and retry"
            if sampled.info.is_batch_invariant
            else "tokens depend on batch composition; retries keep committed shards"
        )
    return metrics
