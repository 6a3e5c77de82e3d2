"""From numbers to the classes that the style sheet colours: log-probs, gaps to the reference, values, advantages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from plugins.pages.token_texts import token_texts


class Colour(StrEnum):
    """What the colour of a token says."""

    SAMPLER = "sampler"
    """The sampler's log-prob: the darker, the less likely."""
    REFERENCE = "reference"
    """Sampler's minus reference's log-prob: red where the policy likes the token more than the reference does."""
    VALUES = "values"
    """The critic's value (PPO)."""
    ADVANTAGE = "advantage"
    """The completion's advantage, which all its tokens share."""


#: Log-probs (nats) at which the next darker step begins.
_STEPS: Final = (-5.0, -3.0, -1.5, -0.7, -0.2)
#: Sizes of a signed number at which the next stronger step begins.
_SIGNED: Final = (0.05, 0.5, 1.5)


@dataclass(frozen=True, slots=True)
class Token:
    """One token as the page shows it."""

    text: str
    """What it reads."""
    kind: str
    """Class that colours it."""
    note: str
    """Its numbers, in words."""


def logprob_kind(logprob: float) -> str:
    """Return the class of a log-prob: `p0` for a certain token to `p5` for a very unlikely one."""
    return f"p{len(_STEPS) - bisect_left(_STEPS, logprob)}"


def signed_kind(value: float | None) -> str:
    """Return the class of a signed number: `n3` (very negative) to `n1`, `z`, `q1` to `q3`; `none` without one."""
    if value is None:
        return "none"
    step = sum(abs(value) >= edge for edge in _SIGNED)
    return "z" if step == 0 else f"{'q' if value > 0 else 'n'}{step}"


def tokens_of(row: Mapping[str, Any], tokenizer: Any, colour: Colour) -> list[Token]:  # noqa: ANN401 - see token_texts
    """Return the tokens of a completion.

    Args:
        row: A row with every column.
        tokenizer: From `TokenTexts`, or None.
        colour: What their colour says; tokens without that number get none.

    Returns:
        One for each token; a single one with the text where the deployment's redaction withholds the token ids.
    """
    if row["completion_token_ids"] is None:
        return [Token(row["completion_text"] or "", "none", "redacted: its tokens are not shown")]
    ids: Sequence[int] = row["completion_token_ids"]
    sampler: Sequence[float] = row["sampler_logprobs"]
    reference: Sequence[float] | None = row["reference_logprobs"]
    values: Sequence[float] | None = row["values"]
    tokens = []
    for index, text in enumerate(token_texts(tokenizer, ids)):
        note = [f"token {ids[index]}", f"log-prob {sampler[index]:.3f}"]
        gap = None if reference is None else sampler[index] - reference[index]
        if reference is not None:
            note.append(f"reference {reference[index]:.3f}")
        value = None if values is None else values[index]
        if value is not None:
            note.append(f"value {value:.3f}")
        kinds = {
            Colour.SAMPLER: logprob_kind(sampler[index]),
            Colour.REFERENCE: signed_kind(gap),
            Colour.VALUES: signed_kind(value),
            Colour.ADVANTAGE: signed_kind(row["advantage"]),
        }
        tokens.append(Token(text, kinds[colour], ", ".join(note)))
    return tokens
