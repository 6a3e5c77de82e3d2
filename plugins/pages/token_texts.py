"""Texts of single tokens, from the tokenizer that lies with a run's policy; torch and transformers are not needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from plugins.pages.run_source import PageRun
from storage.errors import StorageError
from storage.manifest import read_part
from storage.policies import resolve_policy

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME: Final = "tokenizer.json"
_MAX_KEPT: Final = 8


class TokenTexts:
    """Reads tokenizers once and keeps the last few."""

    def __init__(self) -> None:
        """Have none yet."""
        self._kept: dict[str, Tokenizer] = {}
        self._lock = threading.Lock()

    def of_run(self, run: PageRun) -> Tokenizer | None:
        """Return the tokenizer of a run's first policy; None where that has no `tokenizer.json` that can be read."""
        from tokenizers import Tokenizer

        try:
            part = resolve_policy(run.store, run.name, 0).manifest.part(FILE_NAME)
            with self._lock:
                if part.sha256 in self._kept:
                    return self._kept[part.sha256]
            text = read_part(run.store, part).decode("utf-8")
        except (StorageError, UnicodeDecodeError):
            return None  # the page says that it shows ids
        try:
            made = Tokenizer.from_str(text)
        except Exception:  # noqa: BLE001 - the library raises plain Exception for a file that it can't use
            return None
        with self._lock:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[part.sha256] = made
        return made


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text of each token as it reads after the one before it; `#<id>` without a tokenizer.

    A token that is a part of a character reads as the replacement character.
    """
    if tokenizer is None:
        return [f"#{number}" for number in ids]

    def decoded(numbers: Sequence[int]) -> str:
        return str(tokenizer.decode(list(numbers), skip_special_tokens=False))

    texts = [decoded(ids[:1])] if ids else []
    for before, now in pairwise(ids):
        # Some decoders leave out the space before the first token of what they are given.
        alone, both = decoded([before]), decoded([before, now])
        texts.append(both[len(alone) :] if both.startswith(alone) else decoded([now]))
    return texts
