"""Constant shapes: every row is computed in tiles whose shape depends on that row and the model alone.

Matrix products of different shapes round differently, and one unit in the last place is enough to change a sampled
token once in a while. So prompts are padded to a few fixed lengths, and tiles always have the same number of rows, the
last one filled up with dummy rows. What the neighbours are, and how many, then has no influence on a row's numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)

_SMALL_HIDDEN_SIZE = 256
_LOGITS_BYTES = 2**28
"""Largest block of logits in float64 at once when whole sequences are scored."""


def padded_length(num_tokens: int) -> int:
    """Return the padded length: the next multiple of 8 up to 32, of 32 up to 256, of 128 beyond."""
    step = 8 if num_tokens <= 32 else 32 if num_tokens <= 256 else 128
    return -(-num_tokens // step) * step


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows per tile, from the model and the kind of device alone (never from the load)."""

    decode_rows: int
    """Rows of a decoding tile, which has one token per row."""
    prefill_tokens: int
    """Padded tokens of a prefill or scoring tile, which has at least one row."""
    vocabulary: int
    """Vocabulary size."""

    @classmethod
    def for_model(cls, hidden_size: int, vocabulary: int, device_type: str) -> TileShape:
        """Choose tiles: small models are bound by calls and want many rows, larger ones by arithmetic on dummy rows.

        On CPU, products of 16 rows of a larger model already run at half of peak, those of 128 rows at peak.
        """
        is_small, is_on_cpu = hidden_size <= _SMALL_HIDDEN_SIZE, device_type == "cpu"
        if is_small:
            return cls(decode_rows=256, prefill_tokens=512 if is_on_cpu else 2048, vocabulary=vocabulary)
        rows, tokens = (16, 128) if is_on_cpu else (32, 1024)
        return cls(decode_rows=rows, prefill_tokens=tokens, vocabulary=vocabulary)

    def prefill_rows(self, length: int) -> int:
        """Return the rows of a tile of prompts padded to `length`."""
        return max(1, self.prefill_tokens // length)

    def scoring_rows(self, length: int, scored: int) -> int:
        """Return the rows of a tile of sequences padded to `length` of which the last `scored` positions get logits."""
        return max(1, min(self.prefill_tokens // length, _LOGITS_BYTES // (8 * self.vocabulary * scored)))


def blocks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Cut a sequence into blocks of `size`; the last one may be shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def grouped(keys: Sequence[_Key]) -> dict[_Key, list[int]]:
    """Return the indices at which each key stands, keys in order of first appearance."""
    groups: dict[_Key, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return groups
