"""DAPO: clip-higher and a loss in which every token counts the same.

Its other two parts are options of their own: `overlong_buffer_tokens` (soft overlong punishment) and
`dynamic_sampling` (groups without signal are replaced).
"""

from __future__ import annotations

from stages.rl.variants.variant import Variant

VARIANT = Variant(
    name="dapo",
    source="Yu et al. 2025, DAPO, sections 3.1 to 3.4",
    defaults={"clip_high": 0.28, "loss_aggregation": "token_mean"},
)
