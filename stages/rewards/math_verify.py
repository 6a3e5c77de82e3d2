r"""Reward `math_verify`: 1 if the answer is mathematically equal to the gold answer, else 0.

The package's own time-outs use signal.alarm, which works in a main thread only and whose error is easily swallowed;
they are off here, since the deadline of the verifier process holds instead.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import Field

from stages.data.rows import PromptRow
from stages.rewards.extraction import AnswerPattern, answer_in
from stages.rewards.protocol import RewardOptions, ScoringItem, Verdict


class MathVerifyOptions(RewardOptions):
    """Options of `math_verify`."""

    gold_pattern: AnswerPattern | None = None
    """Regular expression with one group around the gold answer inside the answer column; null = the whole column."""

    float_rounding: int = Field(default=6, ge=0, le=15)
    """Decimal places to which numbers are compared."""

    strict: bool = True
    """Whether variables and sets must agree in name and kind."""


class MathVerify:
    """Parses both answers into expressions and compares those (package `math-verify`)."""

    def __init__(self, options: MathVerifyOptions) -> None:
        # Imported here: the light stages read this module's options without the package.
        import math_verify

        # One warning per call says that the time-out is off; that is meant (see the module).
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library = math_verify
        self._options = options

    def verify(self, item: ScoringItem) -> Verdict:
        """1 or 0; None when no expression is found in the completion."""
        gold = self._parsed_gold(item.row)
        if not gold:
            raise ValueError(f"row {item.row.prompt_id} has no gold answer that can be parsed")
        answer = self._parse(item.text)
        if not answer:
            return Verdict(value=None)
        equal = self._library.verify(
            gold,
            answer,
            float_rounding=self._options.float_rounding,
            strict=self._options.strict,
            timeout_seconds=None,
            raise_on_error=True,
        )
        return Verdict(value=float(equal), parsed=str(answer[-1]))

    def gold_fault(self, row: PromptRow) -> str | None:
        """A gold answer that is missing, not found by the pattern, or not an expression."""
        if row.answer is None:
            return "no gold answer"
        return None if self._parsed_gold(row) else f"math-verify finds no expression in the gold answer {row.answer!r}"

    def known_good(self, row: PromptRow) -> str | None:
        """The gold answer in a box, as models are asked to give it."""
        gold = self._gold_text(row)
        return None if gold is None else f"\\boxed{{{gold}}}"

    def _gold_text(self, row: PromptRow) -> str | None:
        return None if row.answer is None else answer_in(row.answer, self._options.gold_pattern)

    def _parsed_gold(self, row: PromptRow) -> list[Any]:
        gold = self._gold_text(row)
        if gold is None:
            return []
        # Bare LaTeX is only looked for between delimiters; a box is one, and it is what the known-good answer uses.
        return self._parse(gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}")

    def _parse(self, text: str) -> list[Any]:
        parsed: list[Any] = self._library.parse(text, parsing_timeout=None, raise_on_error=True)
        # Without any expression in a box the library falls back to the bare text, which equals nothing.
        return parsed if any(not isinstance(part, str) for part in parsed) else []
