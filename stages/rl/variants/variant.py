"""What a named variant of policy optimisation is. Needs neither numpy nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A published method as values of the options that all methods share."""

    name: str
    """Value of `grpo.loss` that asks for it."""
    source: str
    """Paper and section."""
    ratio: Literal["token", "sequence"] = "token"
    """Level of the importance ratio: of each token, or the length-normalised one of the response."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Published values of `GrpoSpec` where they differ from its own defaults; an author's value goes first."""
    needs_group: bool = True
    """Whether an advantage compares the samples of a prompt, so that two of them are needed."""
