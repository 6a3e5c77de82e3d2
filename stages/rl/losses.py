"""The policy loss of every variant, over one set of parts.

Variants (stages/rl/variants) differ in the level of the importance ratio and in clip widths, advantage and
aggregation, whose published values `GrpoSpec` fills in. PPO and REINFORCE++ bring an advantage for every token.

Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stages.rl.aggregation import Normaliser, aggregate
from stages.rl.kl import kl_per_token
from stages.rl.log_ratio import sequence_log_ratio, token_log_ratio
from stages.rl.masks import masked_sum
from stages.rl.spec import GrpoSpec
from stages.rl.surrogate import clipped_surrogate

LOG_RATIOS: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
}
"""Importance log-ratio by its level: (logprobs, old_logprobs, mask), each [B, T], to [B, T]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """A micro-batch of responses as the policy loss needs it."""

    logprobs: Tensor
    """[B, T], log-probs of the sampled tokens under the policy being trained, at the rows' temperature; has the
    gradient."""

    old_logprobs: Tensor
    """[B, T], the trainer's log-probs before the first optimizer step of the iteration."""

    advantages: Tensor
    """[B, T], or [B, 1] for one advantage per response."""

    mask: Tensor
    """[B, T], bool: sampled tokens that count. What lies outside is neither read nor differentiated."""

    reference_logprobs: Tensor | None = None
    """[B, T]; needed when the KL weight isn't 0."""

    correction_weights: Tensor | None = None
    """[B, T], see `stages.rl.importance`; None = 1."""

    entropy: Tensor | None = None
    """[B, T], nats, with gradient; needed when the entropy weight isn't 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Share of a micro-batch in the step's loss, and sums for the metrics."""

    loss: Tensor
    """Scalar with gradient."""

    sums: Mapping[str, float]
    """Sums over unmasked tokens, to be added over parts and divided by `num_tokens`: `num_tokens`, `policy_loss`, `kl`,
    `ratio`, `clipped_low`, `clipped_high`, `dual_clipped`, and `entropy` if known."""


def policy_loss(batch: PolicyBatch, spec: GrpoSpec, normaliser: Normaliser) -> PolicyLoss:
    """Clipped surrogate times correction weight, plus KL penalty, minus entropy bonus, aggregated.

    Args:
        batch: One micro-batch.
        spec: Options of the loss.
        normaliser: Counts over the whole optimizer step.

    Raises:
        ValueError: The batch lacks what a non-zero weight of the spec needs.
    """
    mask = batch.mask
    log_ratio = LOG_RATIOS[spec.ratio](batch.logprobs, batch.old_logprobs, mask)
    advantages = torch.where(mask, batch.advantages.float(), torch.zeros_like(log_ratio))
    surrogate = clipped_surrogate(
        log_ratio, advantages, clip_low=spec.clip_low, clip_high=spec.clip_high, dual_clip=spec.dual_clip
    )
    policy_term = surrogate.losses
    if batch.correction_weights is not None:
        policy_term = policy_term * torch.where(mask, batch.correction_weights.detach(), torch.zeros_like(policy_term))
    kl = _kl_term(batch, spec)
    token_losses = policy_term if kl is None else policy_term + spec.kl.loss_weight * kl
    if spec.entropy_weight > 0.0:
        token_losses = token_losses - spec.entropy_weight * _entropy_term(batch)
    parts: dict[str, Tensor | None] = {
        "policy_loss": policy_term,
        "kl": kl,
        "ratio": log_ratio.exp(),
        "clipped_low": surrogate.clipped_low,
        "clipped_high": surrogate.clipped_high,
        "dual_clipped": surrogate.dual_clipped,
        "entropy": batch.entropy,
    }
    sums = {name: _sum(part, mask) for name, part in parts.items() if part is not None}
    sums["num_tokens"] = float(mask.sum().item())
    return PolicyLoss(loss=aggregate(token_losses, mask, spec.loss_aggregation, normaliser), sums=sums)


def _sum(values: Tensor, mask: Tensor) -> float:
    return float(masked_sum(values.detach().double(), mask).item())


def _kl_term(batch: PolicyBatch, spec: GrpoSpec) -> Tensor | None:
    if batch.reference_logprobs is None:
        if spec.kl.loss_weight > 0.0:
            raise ValueError(
                f"grpo.kl.weight is {spec.kl.weight} but the batch has no reference_logprobs: "
                "run the reference inference, or set the weight to 0"
            )
        return None
    return kl_per_token(batch.logprobs, batch.reference_logprobs, batch.mask, spec.kl.estimator)


def _entropy_term(batch: PolicyBatch) -> Tensor:
    if batch.entropy is None:
        raise ValueError("grpo.entropy_weight is not 0 but the batch has no entropy: compute it with the log-probs")
    return batch.entropy
