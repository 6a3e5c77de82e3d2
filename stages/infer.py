"""Stage infer: rewards and, where the loss needs them, reference log-probs, one after the other (GRPO).

The machine that sampled a shard scores it; reference log-probs are computed where the plan places the reference policy.
PPO has a stage for each of the two.
"""

from __future__ import annotations

from stages import reference_inference, reward_inference
from stages.context import StageContext, StageOutcome


def run_stage(context: StageContext) -> StageOutcome:
    """Score this machine's shards."""
    outcomes = [reward_inference.run_stage(context)]
    if context.job.needs_reference:
        outcomes.append(reference_inference.run_stage(context))
    working = [outcome for outcome in outcomes if outcome.artefacts]
    return StageOutcome(
        reused=bool(working) and all(outcome.reused for outcome in working),
        artefacts=tuple(key for outcome in outcomes for key in outcome.artefacts),
        metrics={name: value for outcome in outcomes for name, value in outcome.metrics.items()},
    )
