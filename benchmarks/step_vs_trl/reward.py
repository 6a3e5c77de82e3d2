"""A reward that varies inside every group and costs nothing."""

from __future__ import annotations

from collections.abc import Sequence


def reward_of(token_ids: Sequence[int]) -> float:
    """1 for an even sum of token ids, else 0."""
    return float(sum(token_ids) % 2 == 0)
