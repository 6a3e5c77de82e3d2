"""Reward `exact_answer`: 1 if the answer equals the gold answer as text, else 0."""

from __future__ import annotations

from stages.data.rows import PromptRow
from stages.rewards.extraction import AnswerPattern, GoldFormat, answer_in
from stages.rewards.protocol import RewardOptions, ScoringItem, Verdict


class ExactAnswerOptions(RewardOptions):
    """Options of `exact_answer`."""

    pattern: AnswerPattern | None = None
    """Regular expression with one group around the answer; the last match counts, no match is `unparsable`.
    Null = the whole completion without surrounding blanks."""

    gold_pattern: AnswerPattern | None = None
    """The same for the answer column; null = the whole column."""

    gold_format: GoldFormat = "{answer}"
    """Completion that a right answer looks like, for the canary; `{answer}` is replaced by the gold answer."""

    ignore_case: bool = False
    """Whether letters of either case are equal."""


class ExactAnswer:
    """Compares text with text."""

    def __init__(self, options: ExactAnswerOptions) -> None:
        self._options = options

    def verify(self, item: ScoringItem) -> Verdict:
        """1 or 0; None when the pattern finds no answer."""
        answer = answer_in(item.text, self._options.pattern)
        if answer is None:
            return Verdict(value=None)
        gold = self.gold_text(item.row)
        if gold is None:
            raise ValueError(f"row {item.row.prompt_id} has no gold answer to compare with")
        return Verdict(value=float(self._folded(answer) == self._folded(gold)), parsed=answer)

    def gold_fault(self, row: PromptRow) -> str | None:
        """A missing or empty gold answer, or one that the pattern doesn't find."""
        if row.answer is None:
            return "no gold answer"
        gold = self.gold_text(row)
        if gold is None:
            return f"gold_pattern {self._options.gold_pattern!r} doesn't match the answer {row.answer!r}"
        return None if gold else "the gold answer is empty"

    def known_good(self, row: PromptRow) -> str | None:
        """The gold answer in `gold_format`."""
        gold = self.gold_text(row)
        return None if gold is None else self._options.gold_format.replace("{answer}", gold)

    def gold_text(self, row: PromptRow) -> str | None:
        """The gold answer as it is compared; None where there is none."""
        return None if row.answer is None else answer_in(row.answer, self._options.gold_pattern)

    def _folded(self, text: str) -> str:
        return text.casefold() if self._options.ignore_case else text
