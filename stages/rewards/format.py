"""Reward `format`: 1 if the completion has the wanted form, else 0."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from stages.data.rows import PromptRow
from stages.rewards.extraction import Pattern
from stages.rewards.protocol import RewardOptions, ScoringItem, Verdict


class FormatOptions(RewardOptions):
    """Options of `format`: exactly one of `pattern` and `tags`."""

    pattern: Pattern | None = None
    """Regular expression that the whole completion, without surrounding blanks, must match; the dot matches line
    ends."""

    tags: tuple[str, ...] = Field(default=())
    """Tag names, e.g. [think, answer]: each pair must occur exactly once, closed, in this order, and nothing but blanks
    may stand outside them."""

    example: str | None = None
    """A completion of the wanted form; it must score 1 before training starts."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.pattern is None) == (not self.tags):
            raise ValueError("format takes exactly one of `pattern` and `tags`")
        bad = [tag for tag in self.tags if not re.fullmatch(r"[A-Za-z_][\w-]*", tag)]
        if bad:
            raise ValueError(f"format.tags {bad} are no tag names; write them without brackets")
        return self


class Format:
    """Looks at the form only, never at the answer."""

    def __init__(self, options: FormatOptions) -> None:
        self._options = options
        self._pattern = re.compile(options.pattern or _tags_pattern(options.tags), flags=re.DOTALL)

    def verify(self, item: ScoringItem) -> Verdict:
        """1 or 0."""
        return Verdict(value=float(self._has_form(item.text.strip())))

    def gold_fault(self, row: PromptRow) -> str | None:
        """None: the form needs no gold answer."""
        del row
        return None

    def known_good(self, row: PromptRow) -> str | None:
        """The author's example."""
        del row
        return self._options.example

    def _has_form(self, text: str) -> bool:
        once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in self._options.tags)
        return once and self._pattern.fullmatch(text) is not None


def _tags_pattern(tags: tuple[str, ...]) -> str:
    return r"\s*".join(rf"<{tag}>.*</{tag}>" for tag in tags)
