"""GRPO as published: group mean and std, mean over a response's tokens, then over responses."""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="grpo",
    source="Shao et al. 2024, DeepSeekMath, section 4.1",
    defaults={"loss_aggregation": "sequence_mean_token_mean"},
)
