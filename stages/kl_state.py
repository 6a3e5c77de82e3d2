"""The weight of the KL penalty from iteration to iteration; its state is part of the policy's resume point.

The weight of iteration k stands in resume point k, so the trainers of policy and critic, and a resumed run, all read
the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from stages.context import StageContext
from stages.engines.protocol import TrainingOutcome
from stages.rl.adaptive_kl import next_kl_weight
from stages.rl.spec import GrpoSpec
from stages.spec.job import TrainingJob
from stages.training_rows import PreparedRows
from storage.checkpoints import load_checkpoint

KL_WEIGHT_KEY: Final = "kl_weight"
"""Field of a resume point's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlControl:
    """What an iteration measured, and the weight that follows."""

    weight: float
    """Weight in force in this iteration."""
    kl_per_response: float | None
    """Mean KL estimate per response, nats; None when nothing was trained on."""
    next_weight: float
    """Weight of the next iteration."""

    def facts(self) -> dict[str, JsonValue]:
        """Return the numbers for the record."""
        return {"kl_weight": self.weight, "kl_per_response": self.kl_per_response, "next_kl_weight": self.next_weight}


def kl_weight_of(context: StageContext) -> float:
    """Return the weight of this iteration: the job's, or what the last iteration made of it."""
    kl = context.job.kl
    if kl.target is None or context.iteration == 0:
        return kl.weight
    checkpoint = load_checkpoint(context.home, context.run.name, context.iteration)
    return float(checkpoint.manifest.metadata[KL_WEIGHT_KEY])


def kl_control(
    job: TrainingJob, weight: float, prepared: PreparedRows, outcome: TrainingOutcome | None
) -> KlControl | None:
    """Return the controller's step; None without a penalty.

    The measured KL is that of the rollouts: summed over each response, from the sampler's log-probs where tokens have
    targets of their own, else from the trainer's loss (mean per token times mean tokens per response).
    """
    if not job.needs_reference:
        return None
    measured = _measured(prepared, outcome)
    following = weight
    if job.kl.target is not None and measured is not None:
        following = next_kl_weight(
            weight,
            measured,
            target_kl=job.kl.target,
            horizon_samples=job.kl.horizon_samples,
            num_samples=len(prepared.kept),
        )
    return KlControl(weight=weight, kl_per_response=measured, next_weight=following)


def with_kl_weight(spec: GrpoSpec, weight: float) -> GrpoSpec:
    """Return the options of the loss with this iteration's weight, where the penalty is part of the loss."""
    if spec.kl.place != "loss" or spec.kl.weight == 0.0:
        return spec
    return spec.model_copy(update={"kl": spec.kl.model_copy(update={"weight": weight})})


def _measured(prepared: PreparedRows, outcome: TrainingOutcome | None) -> float | None:
    if not prepared.kept:
        return None
    if prepared.tokens is not None:
        return prepared.tokens.kl_per_response
    first = outcome.steps[0] if outcome is not None else None
    if first is None or first.num_rows == 0:
        return None
    return first.values["kl"] * first.num_tokens / first.num_rows
