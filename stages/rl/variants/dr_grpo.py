"""GRPO without its two biases: no division by the std, and the sum of tokens over a constant length."""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="dr_grpo",
    source="Liu et al. 2025, Understanding R1-Zero-like training, section 3.2",
    defaults={"advantage": {"normalisation": "none"}, "loss_aggregation": "sequence_mean_token_sum_norm"},
)
