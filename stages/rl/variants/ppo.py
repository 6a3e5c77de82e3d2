"""PPO: per-token advantages from a critic; what the critic adds stands in the section `ppo` of a job."""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="ppo",
    source="Schulman et al. 2017, Proximal policy optimization, equation 7",
    defaults={"loss_aggregation": "token_mean", "drop_zero_variance_groups": False},
    needs_group=False,
)
