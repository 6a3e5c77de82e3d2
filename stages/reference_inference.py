"""Stage reference_inference: log-probs of every rollout under policy version 0, the reference policy."""

from __future__ import annotations

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.policy_files import policy_at_home
from stages.token_scoring import TokenScoring, score_tokens
from storage.rollout_schema import Family


def run_stage(context: StageContext) -> StageOutcome:
    """Score this machine's shards; nothing is done where no KL penalty needs it."""
    if not context.job.needs_reference:
        return StageOutcome(reused=True, metrics={"is_needed": False})
    policy = policy_at_home(context, 0)
    scoring = TokenScoring(
        task=RlTask.REFERENCE_INFERENCE,
        family=Family.REFERENCE,
        column="reference_logprobs",
        constants={"reference_weights_hash": policy.weights_hash},
        weights_hash=policy.weights_hash,
        open_engine=lambda replica: context.engines.reference(replica, policy).score,
    )
    return score_tokens(context, scoring)
