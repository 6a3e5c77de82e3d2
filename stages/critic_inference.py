"""Stage critic_inference (PPO): the critic's value before every token of the rollouts.

The values are of critic version k, which belongs to policy version k; asynchronous iterations wait for it here.
"""

from __future__ import annotations

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.critic_versions import authoritative_critic, critic_directories, load_critic
from stages.token_scoring import Score, TokenScoring, score_tokens
from storage.rollout_schema import Family


def run_stage(context: StageContext) -> StageOutcome:
    """Compute values of this machine's shards, unless the iteration is committed already."""
    critic = authoritative_critic(context)
    if critic is None:
        return StageOutcome(reused=True)

    def open_engine(replica: int) -> Score:
        base, _ = critic_directories(context, 0)
        engine, is_trainer = context.engines.critic_inference(replica, base)
        # An engine that trains later must hold the optimizer too; its version and values would not show the lack.
        load_critic(context, engine, critic, is_for_training=is_trainer)
        return engine.values

    scoring = TokenScoring(
        task=RlTask.CRITIC_INFERENCE,
        family=Family.VALUES,
        column="values",
        constants={"critic_version": critic.version},
        weights_hash=critic.weights_hash,
        open_engine=open_engine,
    )
    return score_tokens(context, scoring)
