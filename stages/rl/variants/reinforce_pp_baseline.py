"""REINFORCE++ with the group mean as baseline and the KL penalty in the loss, for verifiable rewards."""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="reinforce_pp_baseline",
    source="Hu et al. 2025, REINFORCE++, section 3.4 (REINFORCE++-baseline)",
    defaults={
        "advantage": {"estimator": "reinforce_pp_baseline", "normalisation": "none"},
        "loss_aggregation": "token_mean",
        "kl": {"estimator": "k2"},
        "drop_zero_variance_groups": False,
    },
)
