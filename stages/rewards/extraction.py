"""Finding an answer in a completion by a regular expression that the author of the job gives."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _compilable(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    return pattern


def _one_group(pattern: str) -> str:
    groups = re.compile(_compilable(pattern)).groups
    if groups != 1:
        raise ValueError(f"pattern {pattern!r} has {groups} groups; it must have exactly one, around the answer")
    return pattern


def _has_answer(text: str) -> str:
    if text.count("{answer}") != 1:
        raise ValueError(f"gold_format {text!r} must contain {{answer}} exactly once")
    return text


Pattern = Annotated[str, AfterValidator(_compilable)]
"""A regular expression."""

AnswerPattern = Annotated[str, AfterValidator(_one_group)]
"""A regular expression with exactly one group, around the answer."""

GoldFormat = Annotated[str, AfterValidator(_has_answer)]
"""A text that holds `{answer}` once; nothing else in it is interpreted."""


def last_match(pattern: str, text: str) -> str | None:
    """Group 1 of the last match, without surrounding blanks; None without a match. The dot matches line ends."""
    found: str | None = None
    for match in re.finditer(pattern, text, flags=re.DOTALL):
        found = match.group(1)
    return None if found is None else found.strip()


def answer_in(text: str, pattern: str | None) -> str | None:
    """The answer inside a completion or a gold column, e.g. behind `####` in GSM8K; None = the pattern doesn't match.

    Without a pattern the whole text is the answer, but for surrounding blanks.
    """
    return text.strip() if pattern is None else last_match(pattern, text)
