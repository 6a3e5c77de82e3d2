"""A row that the rewards can't judge, or on which no completion can be right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldFault:
    """Why the gold answer of a row is of no use."""

    prompt_id: str
    """Row concerned."""

    reasons: tuple[str, ...]
    """One sentence per reward concerned."""
