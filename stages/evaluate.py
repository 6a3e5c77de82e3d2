"""Stage evaluate: a policy version on held-out prompts, its rollouts and rewards stored like training ones."""

from __future__ import annotations

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.errors import ContractError
from stages.evaluations import stored_evaluation
from stages.generate import run_prompts, sampling_metrics
from stages.reward_model import RewardModel, open_reward_model
from stages.reward_shards import reward_shards
from stages.rollout_shards import Shard
from stages.sampling import sample_shards, shard_keys
from stages.shard_writer import RolloutBatch
from stages.sharding import local_replicas
from storage.layout import Split
from storage.policies import head_version


def run_stage(context: StageContext) -> StageOutcome:
    """Evaluate version k + 1 when it is due; each due evaluation is made exactly once."""
    k = context.iteration
    version = k + 1
    if not is_due(k, context.run.iterations, context.job.evaluation.every):
        return StageOutcome(reused=True, metrics={"is_due": False})
    head = head_version(context.home, context.run.name)
    if head is None or head < version:
        raise ContractError(
            f"run {context.run.name}: version {version} is evaluated after it is committed, but the newest committed "
            f"version is {head}; run stage commit_policy first."
        )
    return evaluate_version(context, version)


def is_due(iteration: int, iterations: int, every: int) -> bool:
    """Whether the policy that an iteration made is evaluated: every n-th and the last one."""
    done = iteration + 1
    return done == iterations or (every > 0 and done % every == 0)


def evaluate_version(context: StageContext, version: int) -> StageOutcome:
    """Sample and score the held-out prompts under a committed policy version, on this machine's engines.

    The engines hold this version until it is done; rollouts of later iterations wait meanwhile, and take the newest
    version afterwards.
    """
    spec = context.job.evaluation
    prompts = run_prompts(context)
    chosen = prompts.for_evaluation(context.job.data.seed, spec.prompts)
    replicas = local_replicas(context.plan.tasks[RlTask.ACTOR_GENERATION], context.machine.name)
    if not replicas:
        raise ContractError(
            f"plan {context.plan_number} places no generation on {context.machine.name}, so it can't evaluate; run "
            "stage evaluate on a machine that generates."
        )
    batch = RolloutBatch(
        split=Split.EVAL,
        number=version,
        prompts=chosen,
        samples_per_prompt=spec.samples_per_prompt,
        temperature=spec.temperature,
        oldest_version=version,
        newest_version=version,
    )
    context.log("evaluate", version=version, prompts=len(chosen))
    sampled = sample_shards(context, batch, prompts, replicas=replicas)
    shards = [Shard(context.store, manifest) for manifest in sampled.manifests]
    rows = {prompt.row.prompt_id: prompt.row for prompt in chosen}
    scored = reward_shards(context, shards, rows, sampled.num_shards, Split.EVAL, model=_reward_model(context))
    metrics = {**sampling_metrics(sampled), **(stored_evaluation(context, version) or {}), "is_due": True}
    return StageOutcome(
        reused=sampled.num_reused == len(sampled.manifests) and scored.num_reused == len(shards),
        artefacts=(*shard_keys(sampled), *(manifest.key for manifest in scored.manifests)),
        metrics=metrics,
    )


def _reward_model(context: StageContext) -> RewardModel | None:
    """Return the reward model on this machine; None where rules alone reward.

    Raises:
        ContractError: the plan places no reward model here.
    """
    if context.job.reward_model is None:
        return None
    replicas = local_replicas(context.plan.tasks[RlTask.REWARD_INFERENCE], context.machine.name)
    if not replicas:
        raise ContractError(
            f"plan {context.plan_number} places no reward model on {context.machine.name}, so it can't evaluate; run "
            "stage evaluate on a machine that has one."
        )
    return open_reward_model(context, replicas[0])
