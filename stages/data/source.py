"""What every dataset source yields, before identity and validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.data.rows import PromptContent


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """A row as its source has it."""

    example: str | None
    """The author's or the source's own id inside the environment; None = the hash of the content will do."""

    prompt: PromptContent
    """Text or chat messages."""

    answer: str | None
    """Gold answer; None = there is none."""

    metadata: Mapping[str, Any]
    """Further columns, values of JSON."""

    environment: str | None = None
    """Environment that the row names itself; None = that of the dataset."""

    part: str | None = None
    """Part of a mixture that it was drawn from, e.g. the task; None = its environment."""
