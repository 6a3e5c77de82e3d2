"""Gold answers that no completion can give are told before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stages.data.rows import PromptRow
from stages.rewards.reachable_gold import unreachable_gold
from stages.rewards.spec import RewardsSpec

EXACT = {"name": "exact_answer"}


def characters(texts: Sequence[str]) -> int | None:
    """Count tokens as a tokenizer with one token per digit, letter or blank does."""
    known = [len(text) for text in texts if text.replace(" ", "").isalnum()]
    return min(known, default=None)


def words(texts: Sequence[str]) -> int | None:
    """Count tokens as a tokenizer does that has words with the blank before them, and else single letters."""
    return min(1 if text.startswith(" ") else len(text) for text in texts)


def reasons(answer: str | None, room: int, *terms: dict, shortest=characters, **fields: object) -> list[str]:
    row = PromptRow(prompt_id="e/1", environment="e", prompt="p", answer=answer)
    spec = RewardsSpec.model_validate({"terms": terms or [EXACT], **fields})
    return [reason for fault in unreachable_gold([row], spec, shortest, room) for reason in fault.reasons]


def test_answer_and_end_token_must_fit_into_the_response() -> None:
    assert reasons("123", 4) == []
    assert reasons("1234", 4) == [
        "exact_answer: the gold answer '1234' takes 4 tokens, but lengths.response has room for 3, so no completion "
        "can be right"
    ]


def test_completion_that_is_scored_though_it_is_cut_needs_no_end_token() -> None:
    assert reasons("1234", 4, score_truncated=True) == []
    assert len(reasons("12345", 4, score_truncated=True)) == 1


def test_answer_that_the_tokenizer_can_not_write_is_out_of_reach() -> None:
    assert reasons("-5", 9) == [
        "exact_answer: the gold answer '-5' holds text that the tokenizer doesn't know, so no completion can be right"
    ]


def test_what_the_gold_pattern_leaves_out_does_not_count() -> None:
    options = {"gold_pattern": r"#### (\S+)", "pattern": r"#### (\S+)"}
    assert reasons("a long way\n#### 7", 2, {**EXACT, "options": options}) == []


@pytest.mark.parametrize(
    "terms",
    [
        [{"name": "math_verify"}],  # an expression has many forms
        [{"name": "format", "options": {"pattern": "x"}}],
        [{**EXACT, "weight": -1.0}, {"name": "format", "options": {"pattern": "x"}}],  # a penalty is earned by others
    ],
)
def test_nothing_is_said_of_rewards_that_do_not_want_the_text(terms: list[dict]) -> None:
    assert reasons("1" * 50, 4, *terms) == []


def test_shortest_way_to_write_the_answer_counts() -> None:
    assert reasons("elephant", 2, shortest=words) == []
    assert reasons("ELEPHANT", 5, {**EXACT, "options": {"ignore_case": True}},
                   shortest=lambda texts: min(1 if text == "elephant" else 9 for text in texts)) == []  # fmt: skip


def test_row_without_an_answer_and_a_long_answer() -> None:
    assert reasons(None, 4) == []
    assert "'" + "7" * 40 + "...' takes 100 tokens" in reasons("7" * 100, 4)[0]
