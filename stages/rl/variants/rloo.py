"""REINFORCE leave-one-out: the mean of the other samples is the baseline, nothing is normalised."""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="rloo",
    source="Ahmadian et al. 2024, Back to basics, equation 7",
    defaults={"advantage": {"estimator": "rloo", "normalisation": "none"}, "loss_aggregation": "token_mean"},
)
