"""What differs between two texts, word by word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

MAX_WORDS: Final = 4000
"""Words of a text that are compared; the matching is quadratic in the worst case."""

_WORD: Final = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text."""

    text: str
    """The text."""
    kind: str
    """same, removed (only in the first text) or added (only in the second one)."""


def diff(first: str, second: str) -> list[Piece]:
    """Return the pieces from which both texts can be read: without what was added, and without what was removed.

    Texts of more than `MAX_WORDS` words are compared up to there and their rests are a piece each.
    """
    a, b = _WORD.findall(first), _WORD.findall(second)
    rest_a, rest_b = "".join(a[MAX_WORDS:]), "".join(b[MAX_WORDS:])
    a, b = a[:MAX_WORDS], b[:MAX_WORDS]
    pieces: list[Piece] = []
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(Piece("".join(a[a0:a1]), "same"))
            continue
        pieces += [Piece("".join(a[a0:a1]), "removed"), Piece("".join(b[b0:b1]), "added")]
    if rest_a == rest_b:
        pieces.append(Piece(rest_a, "same"))
    else:
        pieces += [Piece(rest_a, "removed"), Piece(rest_b, "added")]
    return [piece for piece in pieces if piece.text]
