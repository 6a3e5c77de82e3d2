"""GSPO: the length-normalised ratio of the whole response, with its far narrower clip range."""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="gspo",
    source="Zheng et al. 2025, Group Sequence Policy Optimization, equations 5 and 7, section 5.1",
    ratio="sequence",
    defaults={"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence_mean_token_mean"},
)
