"""REINFORCE++: no critic and no group; the return of each token, normalised over the whole batch."""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="reinforce_pp",
    source="Hu et al. 2025, REINFORCE++, sections 3.1 to 3.3",
    defaults={
        "advantage": {"estimator": "reinforce_pp", "normalisation": "none"},
        "loss_aggregation": "token_mean",
        "kl": {"place": "reward"},
        "drop_zero_variance_groups": False,
    },
    needs_group=False,
)
