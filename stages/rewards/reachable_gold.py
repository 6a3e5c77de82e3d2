"""Rows whose gold answer no completion can give: it doesn't fit into the response, or the tokenizer can't write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from stages.data.gold_fault import GoldFault
from stages.data.rows import PromptRow
from stages.rewards.exact_answer import ExactAnswer, ExactAnswerOptions
from stages.rewards.spec import RewardsSpec

Shortest = Callable[[Sequence[str]], int | None]
"""Tokens of the shortest of some texts; None if the tokenizer knows none of them wholly."""


def unreachable_gold(
    rows: Iterable[PromptRow], spec: RewardsSpec, shortest: Shortest, max_response_tokens: int
) -> list[GoldFault]:
    """Return the rows on which a reward for the right answer can never be earned, in their order.

    Only rewards that compare text can tell: a right completion holds the gold answer word for word, and ends by itself
    unless cut completions are scored. Of other rewards nothing is said, since an answer may be written in many ways.

    Args:
        rows: Rows whose gold answers the rewards can read.
        spec: The rewards.
        shortest: Counts tokens.
        max_response_tokens: Longest completion, its end token included (`lengths.response`).
    """
    terms = [
        (term.key, ExactAnswer(options), options.ignore_case)
        for term in spec.terms
        if term.name == "exact_answer" and term.weight > 0
        for options in [ExactAnswerOptions.model_validate(term.options)]
    ]
    room = max_response_tokens if spec.score_truncated else max_response_tokens - 1
    reason_of: dict[tuple[str, bool], str | None] = {}

    def reasons(row: PromptRow) -> Iterator[str]:
        for key, verifier, ignore_case in terms:
            gold = verifier.gold_text(row)
            if gold is None:
                continue
            if (gold, ignore_case) not in reason_of:
                reason_of[gold, ignore_case] = _reason(gold, shortest, room, ignore_case=ignore_case)
            if (reason := reason_of[gold, ignore_case]) is not None:
                yield f"{key}: {reason}"

    found = [(row.prompt_id, tuple(reasons(row))) for row in rows] if terms else []
    return [GoldFault(prompt_id=prompt_id, reasons=given) for prompt_id, given in found if given]


def _reason(gold: str, shortest: Shortest, room: int, *, ignore_case: bool) -> str | None:
    """Return why no completion can hold an answer; None where one can."""
    tokens = shortest([gold])
    if tokens is None or tokens > room:
        # Blanks around an answer don't count, and many tokenizers have words with the blank before them as one token.
        cases = {gold, gold.lower(), gold.upper(), gold.capitalize()} if ignore_case else {gold}
        tokens = shortest([blank + text for text in sorted(cases) for blank in ("", " ")])
    shown = repr(gold if len(gold) <= _SHOWN_CHARACTERS else f"{gold[:_SHOWN_CHARACTERS]}...")
    if tokens is None:
        return f"the gold answer {shown} holds text that the tokenizer doesn't know, so no completion can be right"
    if tokens > room:
        return (
            f"the gold answer {shown} takes {tokens} tokens, but lengths.response has room for {room}, so no "
            "completion can be right"
        )
    return None


_SHOWN_CHARACTERS = 40
