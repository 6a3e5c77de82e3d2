"""A micro-batch of rows as tensors: distinct tokens, and where they stand in rows that are padded on the right.

Completions of one prompt share its tokens, so that nothing of it has to be computed twice.

Padding on the right needs no attention mask: a causal model's real tokens never look at what comes after them, and the
hidden states of the padding are never read.

Legend of shapes: U distinct tokens, B rows, L padded length, T longest completion, N completion tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stages.engines.protocol import CriticRow, ScoredTokens, TrainingRow

Row = ScoredTokens | TrainingRow | CriticRow
"""Anything with a prompt, a completion and a temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """Inputs of one forward pass and where its log-probs belong."""

    token_ids: Tensor
    """[U], int64, each distinct prompt once and all completions."""
    positions: Tensor
    """[U], position of each token in its row."""
    row_places: Tensor
    """[B, L], where each token of a row stands in `token_ids`; 0 behind its end."""
    token_owners: Tensor
    """[U], the first position of each token in the flattened [B * L]."""
    hidden_index: Tensor
    """[N], positions in the flattened [B * L] whose hidden state predicts a completion token, row by row."""
    targets: Tensor
    """[N], the completion tokens."""
    temperatures: Tensor
    """[N], fp32."""
    mask: Tensor
    """[B, T], bool, true at completion tokens."""

    def inputs(self) -> tuple[Tensor, ...]:
        """Return what the policy module takes, in its order."""
        return (
            self.token_ids, self.positions, self.row_places, self.token_owners,
            self.hidden_index, self.targets, self.temperatures,
        )  # fmt: skip

    def state_inputs(self) -> tuple[Tensor, ...]:
        """Return what leads to the hidden states before completion tokens, in the order of `completion_states`."""
        return (self.token_ids, self.positions, self.row_places, self.token_owners, self.hidden_index)

    def to_rows(self, values: Tensor) -> Tensor:
        """Spread values [N] over [B, T], 0 outside the mask; differentiable."""
        return torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(self.mask, values)


def row_length(row: Row) -> int:
    """Tokens of prompt and completion."""
    return len(row.prompt_token_ids) + len(row.completion_token_ids)


def make_row_tensors(rows: Sequence[Row], device: torch.device) -> RowTensors:
    """Join prompt and completion without its last token; equal prompts share their tokens.

    Args:
        rows: At least one row; every prompt has at least one token.
        device: Where the tensors go.
    """
    # The last token is only predicted, never a condition, so it needs no forward pass.
    width = max(row_length(row) for row in rows) - 1
    widest_completion = max(len(row.completion_token_ids) for row in rows)
    token_ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    prompt_starts: dict[tuple[int, ...], int] = {}
    row_places = np.zeros((len(rows), width), dtype=np.int64)
    mask = torch.zeros((len(rows), widest_completion), dtype=torch.bool)
    hidden_index, targets, temperatures = [], [], []
    for place, row in enumerate(rows):
        prompt, completion = tuple(row.prompt_token_ids), list(row.completion_token_ids)
        known = [*prompt, *completion[:-1]]
        shared = len(prompt) if prompt in prompt_starts else 0
        start = prompt_starts.setdefault(prompt, len(token_ids))
        row_places[place, :shared] = np.arange(start, start + shared)
        row_places[place, shared : len(known)] = np.arange(len(token_ids), len(token_ids) + len(known) - shared)
        token_ids += known[shared:]
        positions += range(shared, len(known))
        owners += range(place * width + shared, place * width + len(known))
        mask[place, : len(completion)] = True
        first = place * width + len(prompt) - 1
        hidden_index.append(np.arange(first, first + len(completion)))
        targets += completion
        temperatures += [row.temperature] * len(completion)
    return RowTensors(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        row_places=torch.from_numpy(row_places).to(device),
        token_owners=torch.tensor(owners, dtype=torch.int64, device=device),
        hidden_index=torch.from_numpy(np.concatenate(hidden_index)).to(device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
        mask=mask.to(device),
    )


def pad_values(values: Sequence[Sequence[float]], width: int, device: torch.device) -> Tensor:
    """Rows of floats padded with 0 on the right. [B, width], fp32."""
    padded = torch.zeros((len(values), width), dtype=torch.float32)
    for place, row in enumerate(values):
        padded[place, : len(row)] = torch.tensor(list(row), dtype=torch.float32)
    return padded.to(device)
