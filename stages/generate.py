"""Stage generate: this machine's rollout shards of an iteration."""

from __future__ import annotations

from pydantic import JsonValue

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.policy_files import policy_at_home, policy_directory
from stages.prompts import EncodedRow, Prompts, open_prompts, prompt_cache
from stages.sampling import SampledShards, policy_for, sample_shards, shard_keys
from stages.shard_writer import RolloutBatch
from stages.sharding import machine_of
from stages.staleness.pacing import version_needed
from storage.layout import Split


def run_stage(context: StageContext) -> StageOutcome:
    """Sample the shards that the plan gives this machine; shards that stand already are kept."""
    k, job = context.iteration, context.job
    prompts = run_prompts(context)
    batch = RolloutBatch(
        split=Split.TRAIN,
        number=k,
        prompts=prompts.of_iteration(job.data.seed, k, job.prompts_per_iteration),
        further=further_prompts(context, prompts),
        max_rounds=0 if job.grpo.dynamic_sampling is None else job.grpo.dynamic_sampling.max_rounds,
        samples_per_prompt=job.responses_per_prompt,
        temperature=job.sampling.temperature,
        top_p=job.sampling.top_p,
        top_k=job.sampling.top_k,
        oldest_version=version_needed(k, job.generate_ahead),
        newest_version=k,
    )
    policy = policy_for(context, batch)
    context.log("sample", version=policy.version, prompts=len(batch.prompts))
    baseline = _baseline(context)
    sampled = sample_shards(context, batch, prompts)
    return StageOutcome(
        reused=bool(sampled.manifests) and sampled.num_reused == len(sampled.manifests) and baseline.reused,
        artefacts=(*baseline.artefacts, *shard_keys(sampled)),
        metrics=sampling_metrics(sampled) | {"baseline": {**baseline.metrics}},
    )


def further_prompts(context: StageContext, prompts: Prompts) -> list[EncodedRow]:
    """Return the prompts that may take the place of groups without signal; none without dynamic sampling."""
    job = context.job
    if job.grpo.dynamic_sampling is None:
        return []
    count = job.prompts_per_iteration
    return prompts.further(job.data.seed, context.iteration, count, count * job.grpo.dynamic_sampling.max_rounds)


def _baseline(context: StageContext) -> StageOutcome:
    """Evaluate the version that the run begins with, by the engines that hold it anyway; one machine does it."""
    from stages.evaluate import evaluate_version  # evaluations sample with this module's functions

    is_mine = machine_of(context.plan.tasks[RlTask.ACTOR_GENERATION], 0) == context.machine.name
    first = context.run.first_iteration
    return evaluate_version(context, first) if context.iteration == first and is_mine else StageOutcome(reused=True)


def run_prompts(context: StageContext) -> Prompts:
    """Return the run's encoded prompts, made with the tokenizer of policy version 0."""
    directory = policy_directory(context, policy_at_home(context, 0))
    with context.phase("prompts"):
        cache = prompt_cache(context.state_dir, context.run.name)
        return open_prompts(context.job, directory, cache, context.deadline)


def sampling_metrics(sampled: SampledShards) -> dict[str, JsonValue]:
    """Return the numbers of a sampling stage."""
    stats = sampled.stats
    seconds = stats["engine_s"]
    metrics: dict[str, JsonValue] = {
        "policy_versions": [*sorted({v for manifest in sampled.manifests for v in manifest.policy_versions})],
        "num_shards": len(sampled.manifests),
        "num_shards_all_machines": sampled.num_shards,
        "num_reused_shards": sampled.num_reused,
        "rows": stats["rows"],
        "tokens": stats["tokens"],
        "truncated": stats["truncated"],
        "interrupted": stats["interrupted"],
        "further_groups": stats["further_groups"],
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
