"""Log-probs of every row under the weights at the start of a call, shared by all ranks.

They are the denominator of the policy ratio and the numerator of the importance correction. The rows of the first
optimizer step get them from that step's own forward pass (their ratio is exactly 1); only the others need a pass more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stages.engines.training.rank_group import RankGroup
from stages.engines.training.row_tensors import Row, RowTensors


class StartLogprobs:
    """One flat buffer of log-probs with a place for each completion token."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        """Make an empty buffer for the completions of `rows`."""
        self._sizes = [len(row.completion_token_ids) for row in rows]
        self._offsets = [0]
        for size in self._sizes:
            self._offsets.append(self._offsets[-1] + size)
        self._values = torch.zeros(self._offsets[-1], dtype=torch.float32, device=device)
        self._unshared = torch.zeros_like(self._values)
        self._known: set[int] = set()

    def knows(self, row_indices: Iterable[int]) -> bool:
        """Whether all these rows have been shared."""
        return self._known.issuperset(row_indices)

    def put(self, row_indices: Sequence[int], flat_logprobs: Tensor) -> None:
        """Keep this rank's log-probs of whole rows [N], row by row, until they are shared."""
        offset = 0
        for row in row_indices:
            size = self._sizes[row]
            self._unshared[self._offsets[row] : self._offsets[row + 1]] = flat_logprobs[offset : offset + size]
            offset += size

    def share(self, row_indices: Sequence[int], ranks: RankGroup) -> None:
        """Give all ranks the log-probs that each of them put; `row_indices` are the rows of all ranks together."""
        # Each row was put by one rank and is 0 elsewhere, so the sum is exact.
        self._values += ranks.sum(self._unshared)
        self._unshared.zero_()
        self._known.update(row_indices)

    def take(self, row_indices: Sequence[int], tensors: RowTensors) -> Tensor:
        """Log-probs of rows as [B, T], 0 outside the mask."""
        parts = [self._values[self._offsets[row] : self._offsets[row + 1]] for row in row_indices]
        return tensors.to_rows(torch.cat(parts))

    def to_lists(self) -> list[list[float]]:
        """Log-probs of each row, [rows][completion tokens]."""
        flat = self._values.tolist()
        return [flat[start:end] for start, end in zip(self._offsets, self._offsets[1:], strict=False)]
