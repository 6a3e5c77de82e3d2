"""Sums and maxima of one optimizer step over micro-batches and ranks, and the metrics made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from stages.engines.training.rank_group import RankGroup
from stages.rl.importance import ImportanceStats
from stages.rl.masks import masked_sum

_LOSS_SUMS = ("num_tokens", "policy_loss", "kl", "ratio", "clipped_low", "clipped_high", "dual_clipped", "entropy")
_RATIO_SUMS = tuple(f.name for f in fields(ImportanceStats) if not f.name.startswith("max_"))


@dataclass(slots=True)
class StepSums:
    """What the micro-batches of one rank add up to; `over_ranks` makes it the whole step's."""

    loss: float = 0.0
    """Share of the loss; already divided by the step's counts."""
    num_rows: float = 0.0
    """Rows trained on."""
    num_micro_batches: float = 0.0
    """Forward and backward passes."""
    padded_tokens: float = 0.0
    """Tokens computed, padding included."""
    real_tokens: float = 0.0
    """Prompt and completion tokens."""
    gap_tokens: float = 0.0
    """Tokens whose sampler and trainer log-probs were compared."""
    sum_abs_gap: float = 0.0
    """Sum of |trainer - sampler| log-prob at the start of the call, nats."""
    sum_gap_kl: float = 0.0
    """Sum of the k3 estimate of KL(sampler || trainer), nats."""
    max_abs_gap: float = 0.0
    """Largest |trainer - sampler|, nats."""
    max_log_ratio: float = -math.inf
    """Largest log(policy / policy at the start of the call), nats."""
    max_weight: float = 0.0
    """Largest importance weight."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_LOSS_SUMS, 0.0))
    """Sums over unmasked tokens of the loss's parts."""
    importance: ImportanceStats = field(default_factory=ImportanceStats)
    """Sampler-to-trainer ratios."""

    def add_loss(self, loss: Tensor, sums: Mapping[str, float]) -> None:
        """Add a micro-batch's share of the loss and its parts."""
        self.loss += float(loss.detach())
        for name, value in sums.items():
            self.parts[name] += value

    def add_gap(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> None:
        """Add the mismatch between trainer and sampler on a micro-batch. All [B, T]."""
        gap = torch.where(mask, trainer_logprobs.double() - sampler_logprobs.double(), 0.0)
        self.gap_tokens += float(mask.sum())
        self.sum_abs_gap += float(gap.abs().sum())
        # Tokens come from the sampler, so k3 with r = trainer / sampler estimates KL(sampler || trainer).
        self.sum_gap_kl += float(masked_sum(gap.clamp(max=20.0).exp() - 1.0 - gap, mask))
        if gap.numel():
            self.max_abs_gap = max(self.max_abs_gap, float(gap.abs().max()))

    def over_ranks(self, ranks: RankGroup) -> StepSums:
        """Return the same of all ranks together; every rank calls it."""
        plain = {name: getattr(self, name) for name in _PLAIN_SUMS}
        ratios = {f"importance.{name}": getattr(self.importance, name) for name in _RATIO_SUMS}
        parts = {f"parts.{name}": value for name, value in self.parts.items()}
        total = ranks.sum_mapping({**plain, **ratios, **parts})
        maxima = (self.max_abs_gap, self.max_log_ratio, self.max_weight, self.importance.max_abs_log_ratio)
        max_gap, max_ratio, max_weight, max_abs = ranks.max_floats(maxima)
        return StepSums(
            **{name: total[name] for name in _PLAIN_SUMS},
            max_abs_gap=max_gap,
            max_log_ratio=max_ratio,
            max_weight=max_weight,
            parts={name: total[f"parts.{name}"] for name in _LOSS_SUMS},
            importance=ImportanceStats(
                max_abs_log_ratio=max_abs, **{name: total[f"importance.{name}"] for name in _RATIO_SUMS}
            ),
        )

    def metrics(self) -> dict[str, float]:
        """Means and maxima of the step, by name; call it on the sums over ranks."""
        tokens = max(self.parts["num_tokens"], 1.0)
        compared = max(self.gap_tokens, 1.0)
        mean = {name: value / tokens for name, value in self.parts.items()}
        return {
            "loss": self.loss,
            "policy_loss": mean["policy_loss"],
            "kl": mean["kl"],
            "entropy": mean["entropy"],
            "ratio_mean": mean["ratio"],
            "ratio_max": math.exp(min(self.max_log_ratio, 20.0)),
            "clip_fraction_low": mean["clipped_low"],
            "clip_fraction_high": mean["clipped_high"],
            "clip_fraction_dual": mean["dual_clipped"],
            "importance_ratio_mean": self.importance.mean_ratio,
            "importance_weight_mean": self.importance.sum_weight / max(self.importance.num_ratios, 1.0),
            "importance_weight_max": self.max_weight,
            "importance_clipped_fraction": self.importance.clipped_fraction,
            "importance_zero_fraction": self.importance.zero_fraction,
            "effective_sample_fraction": self.importance.effective_sample_fraction,
            "effective_sample_size": self.importance.effective_sample_size,
            "sampler_gap_mean": self.sum_abs_gap / compared,
            "sampler_gap_max": self.max_abs_gap,
            "sampler_kl": self.sum_gap_kl / compared,
            "num_micro_batches": self.num_micro_batches,
            "padding_fraction": 1.0 - self.real_tokens / max(self.padded_tokens, 1.0),
        }


_PLAIN_SUMS = (
    "loss", "num_rows", "num_micro_batches", "padded_tokens", "real_tokens", "gap_tokens", "sum_abs_gap", "sum_gap_kl",
)  # fmt: skip
