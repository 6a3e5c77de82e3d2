"""Importance correction between the sampler that wrote a rollout and the trainer that learns from it.

The two differ although they hold the same weights (other kernels, other precision, other batch), or since the rollout
is older than the policy. Weights carry no gradient.

Legend of shapes: B rows (responses), T response positions.

References:
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (truncated weights).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.rl.correction_spec import CorrectionSpec, RejectionSpec
from stages.rl.log_ratio import sequence_log_ratio, token_log_ratio
from stages.rl.masks import masked_mean, masked_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceStats:
    """Sums that describe the ratios of a set of tokens (level token) or responses (level sequence); parts add up."""

    num_ratios: float = 0.0
    """Ratios counted."""

    num_clipped: float = 0.0
    """Ratios outside the allowed range (over the cap, or under the floor)."""

    num_zero: float = 0.0
    """Ratios whose weight is 0: masked, or of a rejected response."""

    sum_ratio: float = 0.0
    """Sum of the ratios before truncation."""

    sum_weight: float = 0.0
    """Sum of the weights after truncation or masking."""

    sum_squared_weight: float = 0.0
    """Sum of their squares."""

    sum_abs_log_ratio: float = 0.0
    """Sum of |log ratio|, nats."""

    max_abs_log_ratio: float = 0.0
    """Largest |log ratio|, nats."""

    def __add__(self, other: ImportanceStats) -> ImportanceStats:
        """Stats of both parts."""
        return ImportanceStats(
            num_ratios=self.num_ratios + other.num_ratios,
            num_clipped=self.num_clipped + other.num_clipped,
            num_zero=self.num_zero + other.num_zero,
            sum_ratio=self.sum_ratio + other.sum_ratio,
            sum_weight=self.sum_weight + other.sum_weight,
            sum_squared_weight=self.sum_squared_weight + other.sum_squared_weight,
            sum_abs_log_ratio=self.sum_abs_log_ratio + other.sum_abs_log_ratio,
            max_abs_log_ratio=max(self.max_abs_log_ratio, other.max_abs_log_ratio),
        )

    @property
    def mean_ratio(self) -> float:
        """Mean ratio before truncation; near 1 with equal weights and matching sampling settings. 0 when empty."""
        return self.sum_ratio / max(self.num_ratios, 1.0)

    @property
    def clipped_fraction(self) -> float:
        """Share of ratios outside the allowed range, in [0, 1]."""
        return self.num_clipped / max(self.num_ratios, 1.0)

    @property
    def mean_abs_log_ratio(self) -> float:
        """Mean |log ratio|, nats."""
        return self.sum_abs_log_ratio / max(self.num_ratios, 1.0)

    @property
    def zero_fraction(self) -> float:
        """Share of ratios with weight 0, in [0, 1]."""
        return self.num_zero / max(self.num_ratios, 1.0)

    @property
    def effective_sample_size(self) -> float:
        """Kish's effective sample size (sum w)^2 / sum w^2, in [0, num_ratios]; tokens or responses, by level."""
        return self.effective_sample_fraction * self.num_ratios

    @property
    def effective_sample_fraction(self) -> float:
        """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2), in [0, 1]; 0 when empty."""
        if self.sum_squared_weight == 0.0:
            return 0.0
        return self.sum_weight**2 / (self.num_ratios * self.sum_squared_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights of a batch and the mask that remains."""

    weights: Tensor
    """[B, T], fp32, no gradient; 0 outside `mask`."""

    mask: Tensor
    """[B, T], bool: tokens that count in the loss and in its normaliser; with denominator `all` every token, though
    those that are masked or rejected weigh 0."""

    stats: ImportanceStats
    """Description of the ratios."""


def add_kept_mass(sampler_logprobs: Tensor, log_kept_mass: Tensor) -> Tensor:
    """Log-probs under the untruncated distribution, from those under top-p/top-k/min-p.

    A truncating sampler divides by the kept mass S, so its log-probs are too large by -log S and every ratio is off by
    the factor S (trl#6789).

    Args:
        sampler_logprobs: [B, T], as sampled from.
        log_kept_mass: [B, T], log S of each position, <= 0.
    """
    return sampler_logprobs + log_kept_mass


def importance_correction(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, spec: CorrectionSpec
) -> Correction:
    """Weights w = trainer / sampler probability, truncated or masked as the spec says.

    Args:
        trainer_logprobs: [B, T], the trainer's log-probs of the sampled tokens before the first optimizer step of the
            iteration, at the temperature of each row.
        sampler_logprobs: [B, T], as sampled from.
        mask: [B, T], bool.
        spec: Level, mode and bounds.

    Returns:
        Weights, remaining mask and stats. Mode `none` gives weight 1 and still reports the ratios.
    """
    with torch.no_grad():
        log_ratio_of = token_log_ratio if spec.level == "token" else sequence_log_ratio
        log_ratio = log_ratio_of(trainer_logprobs, sampler_logprobs, mask)
        ratio = log_ratio.exp()
        outside = (ratio > spec.cap) | (ratio < spec.floor)
        kept = mask & ~outside if spec.mode == "mask" else mask
        if spec.reject is not None:
            token_ratio = token_log_ratio(trainer_logprobs, sampler_logprobs, mask)
            kept = kept & ~rejected_rows(token_ratio, mask, spec.reject).unsqueeze(-1)
        weights = torch.ones_like(ratio) if spec.mode == "none" else ratio.clamp(max=spec.cap)
        weights = torch.where(kept, weights, torch.zeros_like(weights))
        counted = mask if spec.level == "token" else _first_of_each_row(mask)
        stats = _stats(log_ratio, ratio, weights, outside, counted)
    return Correction(weights=weights, mask=kept if spec.denominator == "kept" else mask, stats=stats)


def rejected_rows(log_ratio: Tensor, mask: Tensor, spec: RejectionSpec) -> Tensor:
    """Which responses are too far from the policy being trained. [B], bool.

    Args:
        log_ratio: [B, T], log(proximal / behaviour) of tokens that the behaviour policy sampled, bounded.
        mask: [B, T], bool.
        spec: Estimator, aggregate and limit. With `max`, |k1| counts: a token may be too unlikely or too likely.
    """
    estimate = {
        "k1": -log_ratio,
        "k2": log_ratio.square() / 2,
        "k3": log_ratio.exp() - 1.0 - log_ratio,
    }[spec.estimator]
    if spec.aggregate == "mean":
        return masked_mean(estimate, mask, dim=-1) > spec.limit
    return torch.where(mask, estimate.abs(), torch.zeros_like(estimate)).amax(dim=-1) > spec.limit


def _first_of_each_row(mask: Tensor) -> Tensor:
    """[B, T] bool with the first unmasked position of each row, so that a response counts once."""
    return mask & (mask.cumsum(dim=-1) == 1)


def _stats(log_ratio: Tensor, ratio: Tensor, weights: Tensor, outside: Tensor, counted: Tensor) -> ImportanceStats:
    magnitude = torch.where(counted, log_ratio.abs(), torch.zeros_like(log_ratio))
    return ImportanceStats(
        num_ratios=float(counted.sum().item()),
        num_clipped=float((outside & counted).sum().item()),
        num_zero=float(((weights == 0.0) & counted).sum().item()),
        sum_ratio=float(masked_sum(ratio.double(), counted).item()),
        sum_weight=float(masked_sum(weights.double(), counted).item()),
        sum_squared_weight=float(masked_sum(weights.double().square(), counted).item()),
        sum_abs_log_ratio=float(magnitude.double().sum().item()),
        max_abs_log_ratio=float(magnitude.max().item()) if magnitude.numel() else 0.0,
    )
