"""Variants by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stages.rl.variants import dapo, dr_grpo, grpo, gspo, ppo, reinforce_pp, reinforce_pp_baseline, rloo
from stages.rl.variants.variant import Variant

VARIANTS: Final[Mapping[str, Variant]] = {
    module.VARIANT.name: module.VARIANT
    for module in (grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, reinforce_pp_baseline, ppo)
}
"""Variant by its name in `GrpoSpec.loss`."""
