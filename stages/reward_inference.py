"""Stage reward_inference: the reward of every completion, by rules and, where the job has one, by a reward model.

Rules are scored on the machine that sampled; with a reward model, on the machines where the plan places that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.generate import further_prompts, run_prompts
from stages.inference_shards import dealt_shards, num_shards_of, rollouts_of
from stages.reward_model import RewardModel, open_reward_model
from stages.reward_shards import reward_shards
from storage.layout import Split


def run_stage(context: StageContext) -> StageOutcome:
    """Score this machine's shards; committed scores of the same rollouts and rewards are kept."""
    num_shards = num_shards_of(context)
    rows = _rows_by_id(context)
    scored = [
        reward_shards(context, rollouts_of(context, shards), rows, num_shards, Split.TRAIN, model=model)
        for shards, model in _work(context, num_shards)
        if shards
    ]
    manifests = [manifest for part in scored for manifest in part.manifests]
    num_reused = sum(part.num_reused for part in scored)
    statuses: dict[str, int] = {}
    for part in scored:
        for name, amount in part.num_by_status.items():
            statuses[name] = statuses.get(name, 0) + amount
    valued = [(part.mean, part.num_valued) for part in scored if part.mean is not None]
    count = sum(number for _, number in valued)
    return StageOutcome(
        reused=bool(manifests) and num_reused == len(manifests),
        artefacts=tuple(manifest.key for manifest in manifests),
        metrics={
            "num_shards": len(manifests),
            "num_reused_shards": num_reused,
            "reward_status": {**statuses},
            "reward_mean": sum(mean * number for mean, number in valued) / count if count else None,
        },
    )


def _work(context: StageContext, num_shards: int) -> list[tuple[list[int], RewardModel | None]]:
    """Return this machine's shards with the reward model's replica that scores them."""
    if context.job.reward_model is None:
        return [(shards, None) for shards in dealt_shards(context, RlTask.ACTOR_GENERATION, num_shards).values()]
    dealt = dealt_shards(context, RlTask.REWARD_INFERENCE, num_shards)
    return [(shards, open_reward_model(context, replica)) for replica, shards in dealt.items()]


def _rows_by_id(context: StageContext) -> Mapping[str, Any]:
    job, prompts = context.job, run_prompts(context)
    rows = prompts.of_iteration(job.data.seed, context.iteration, job.prompts_per_iteration)
    return {prompt.row.prompt_id: prompt.row for prompt in (*rows, *further_prompts(context, prompts))}
