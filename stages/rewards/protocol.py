"""What goes into a reward and what comes out: the protocol that every verifier follows.

A value exists exactly when the status is `ok`. A verifier that fails says so; it never answers 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from stages.data.rows import PromptRow
from storage.rollout_schema import FinishReason, RewardStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringItem:
    """One completion to be scored."""

    row: PromptRow
    """The prompt; its `answer` is the gold answer."""

    text: str
    """The completion, decoded."""

    finish_reason: FinishReason
    """Why sampling ended; it alone tells whether the completion is complete (never the last token)."""

    def to_json(self) -> dict[str, Any]:
        """The item as a JSON object."""
        return {"row": self.row.to_json(), "text": self.text, "finish_reason": self.finish_reason.value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ScoringItem:
        """The item that `to_json` described."""
        return cls(
            row=PromptRow.from_json(document["row"]),
            text=document["text"],
            finish_reason=FinishReason(document["finish_reason"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Answer of one verifier."""

    value: float | None
    """Value, usually in [0, 1]; None = no answer could be found in the completion."""

    parsed: str | None = None
    """The answer as the verifier read it."""

    def __post_init__(self) -> None:
        """Refuse values that are no number."""
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a verifier returned {self.value}; a value is a finite number, or None for no answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Outcome of scoring one completion."""

    value: float | None
    """Weighted sum of the parts; None unless the status is `ok`."""

    status: RewardStatus
    """How scoring ended."""

    parts: Mapping[str, float] = field(default_factory=dict)
    """Value of each term before weighting, as far as known, by `RewardSpec.key`."""

    parsed: str | None = None
    """Answer as read by the first term that read one."""

    error: str | None = None
    """What went wrong, for the statuses `timed_out` and `crashed`."""

    def __post_init__(self) -> None:
        """Hold the rule that joins value and status."""
        if (self.value is not None) != (self.status is RewardStatus.OK):
            raise ValueError(f"reward value {self.value} with status {self.status}: only `ok` has a value, and always")

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "value": self.value,
            "status": self.status.value,
            "parts": dict(self.parts),
            "parsed": self.parsed,
            "error": self.error,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RewardResult:
        """The result that `to_json` described."""
        return cls(**{**document, "status": RewardStatus(document["status"])})


class Verifier(Protocol):
    """Judges completions; made once per process from its options, then called many times."""

    def verify(self, item: ScoringItem) -> Verdict:
        """Value of one completion. An exception becomes the status `crashed`, an endless loop `timed_out`."""
        ...

    def gold_fault(self, row: PromptRow) -> str | None:
        """Why this row can't be judged (no gold answer, or one that can't be parsed); None = it can."""
        ...

    def known_good(self, row: PromptRow) -> str | None:
        """A completion of this row that must score 1, for the canary; None = none is known."""
        ...


class RewardOptions(BaseModel):
    """Options of a reward; each reward has its own subclass."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
