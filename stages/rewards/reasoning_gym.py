"""Reward `reasoning_gym`: the score function of the reasoning-gym task that made the row."""

from __future__ import annotations

from typing import Any

from stages.data.reasoning_gym_source import GYM_METADATA_KEY, task_entry
from stages.data.rows import PromptRow
from stages.rewards.extraction import AnswerPattern, GoldFormat, answer_in
from stages.rewards.protocol import RewardOptions, ScoringItem, Verdict


class ReasoningGymOptions(RewardOptions):
    """Options of `reasoning_gym`."""

    pattern: AnswerPattern | None = None
    """Regular expression with one group around the answer; the last match counts, no match is `unparsable`.
    Null = the whole completion without surrounding blanks."""

    gold_format: GoldFormat = "{answer}"
    """Completion that a right answer looks like, for the canary; `{answer}` is replaced by the gold answer."""


class ReasoningGym:
    """Makes the task's entry again from its seed and asks the task to score the answer (package `reasoning-gym`)."""

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options

    def verify(self, item: ScoringItem) -> Verdict:
        """The task's score, in [0, 1]; None when the pattern finds no answer."""
        answer = answer_in(item.text, self._options.pattern)
        if answer is None:
            return Verdict(value=None)
        dataset, entry = self._task_entry(item.row)
        return Verdict(value=float(dataset.score_answer(answer, entry)), parsed=answer)

    def gold_fault(self, row: PromptRow) -> str | None:
        """A row that doesn't come from a `reasoning-gym:` source."""
        if GYM_METADATA_KEY in row.metadata:
            return None
        return "the row has no reasoning-gym task; this reward is for sources reasoning-gym:<task>"

    def known_good(self, row: PromptRow) -> str | None:
        """The task's own answer in `gold_format`; None where the task has no single one."""
        return None if row.answer is None else self._options.gold_format.replace("{answer}", row.answer)

    def _task_entry(self, row: PromptRow) -> tuple[Any, dict[str, Any]]:
        fault = self.gold_fault(row)
        if fault is not None:
            raise ValueError(f"row {row.prompt_id}: {fault}")
        return task_entry(row.metadata[GYM_METADATA_KEY])
