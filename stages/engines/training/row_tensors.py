"""A micro-batch of rows as tensors: prompt and completion joined, padded on the right.

Padding on the right needs no attention mask: a causal model's real tokens never look at what comes after them, and the
hidden states of the padding are never read.

Legend of shapes: B rows, L padded length, T longest completion, N completion tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.engines.protocol import ScoredTokens, TrainingRow

Row = ScoredTokens | TrainingRow
"""Anything with a prompt, a completion and a temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """Inputs of one forward pass and where its log-probs belong."""

    input_ids: Tensor
    """[B, L], int64."""
    hidden_index: Tensor
    """[N], positions in the flattened [B * L] whose hidden state predicts a completion token, row by row."""
    targets: Tensor
    """[N], the completion tokens."""
    temperatures: Tensor
    """[N], fp32."""
    mask: Tensor
    """[B, T], bool, true at completion tokens."""

    def to_rows(self, values: Tensor) -> Tensor:
        """Spread values [N] over [B, T], 0 outside the mask; differentiable."""
        return torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(self.mask, values)


def row_length(row: Row) -> int:
    """Tokens of prompt and completion."""
    return len(row.prompt_token_ids) + len(row.completion_token_ids)


def make_row_tensors(rows: Sequence[Row], pad_token_id: int, device: torch.device) -> RowTensors:
    """Join prompt and completion without its last token, and pad to the longest row.

    Args:
        rows: At least one row; every prompt has at least one token.
        pad_token_id: Any valid id; what it is doesn't matter.
        device: Where the tensors go.
    """
    # The last token is only predicted, never a condition, so it needs no forward pass.
    width = max(row_length(row) for row in rows) - 1
    widest_completion = max(len(row.completion_token_ids) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), widest_completion), dtype=torch.bool)
    hidden_index, targets, temperatures = [], [], []
    for place, row in enumerate(rows):
        prompt, completion = list(row.prompt_token_ids), list(row.completion_token_ids)
        known = [*prompt, *completion[:-1]]
        input_ids[place, : len(known)] = torch.tensor(known, dtype=torch.int64)
        mask[place, : len(completion)] = True
        first = place * width + len(prompt) - 1
        hidden_index.append(torch.arange(first, first + len(completion)))
        targets.append(torch.tensor(completion, dtype=torch.int64))
        temperatures.append(torch.full((len(completion),), row.temperature, dtype=torch.float32))
    return RowTensors(
        input_ids=input_ids.to(device),
        hidden_index=torch.cat(hidden_index).to(device),
        targets=torch.cat(targets).to(device),
        temperatures=torch.cat(temperatures).to(device),
        mask=mask.to(device),
    )


def pad_values(values: Sequence[Sequence[float]], width: int, device: torch.device) -> Tensor:
    """Rows of floats padded with 0 on the right. [B, width], fp32."""
    padded = torch.zeros((len(values), width), dtype=torch.float32)
    for place, row in enumerate(values):
        padded[place, : len(row)] = torch.tensor(list(row), dtype=torch.float32)
    return padded.to(device)
