"""From logits to one token per row: temperature, top-k, top-p, and a draw from the row's own random numbers.

Each sample's uniforms come from Philox, a counter-based generator (Salmon et al. 2011), keyed by its own seed; the
token is found by inverting the cumulative distribution. So a row's token depends on its seed, its position and its
logits alone. Probabilities are computed in float64.

Legend of shapes: R rows, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.errors import NumericsError

MAX_SEED = 2**64 - 1
"""Largest seed of a sample."""


def uniforms(seeds: Sequence[int], num_tokens: int) -> NDArray[np.float64]:
    """Return each seed's first uniforms in [0, 1); a longer series starts with the shorter one. [R, T]."""
    series = np.empty((len(seeds), num_tokens))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=series[row])
    return series


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Sampling settings of a block of rows."""

    temperature: Tensor
    """0 decodes greedily. [R] float64"""
    top_k: Tensor
    """Candidates kept; 0 keeps all. [R] int64"""
    top_p: Tensor
    """Nucleus mass; 1 keeps all. [R] float64"""

    def select(self, rows: Tensor) -> SamplingRows:
        """Return the settings of some rows. rows: [R'] int64."""
        return SamplingRows(temperature=self.temperature[rows], top_k=self.top_k[rows], top_p=self.top_p[rows])


def processed_logprobs(logits: Tensor, settings: SamplingRows) -> Tensor:
    """Return the log-probs of the distribution that is sampled from: tempered, truncated by top-k, then by top-p.

    The temperature divides the logits, not the log-probs (prime-rl#697). Greedy rows keep the untempered distribution.
    Ties with the k-th candidate are kept. top-p keeps the smallest set of most likely tokens whose mass reaches it.

    Args:
        logits: [R, V], any floating type.
        settings: Of the same rows.

    Returns:
        [R, V] float64; minus infinity where a token can't be sampled.

    Raises:
        NumericsError: Logits of a row are not a distribution (NaN, plus infinity, or all minus infinity).
    """
    temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)
    logprobs = normalise(logits.double() / temperature.unsqueeze(-1))
    truncated = ((settings.top_k > 0) & (settings.top_k < logits.shape[-1])) | (settings.top_p < 1)
    rows = truncated.nonzero().squeeze(-1)
    if rows.numel():
        logprobs[rows] = _truncate(logprobs[rows], settings.select(rows))
    return logprobs


def normalise(logits: Tensor) -> Tensor:
    """Return log-softmax over the last axis; `NumericsError` where logits are not a distribution."""
    mass = torch.logsumexp(logits, dim=-1, keepdim=True)
    if not bool(torch.isfinite(mass).all()):
        bad = int((~torch.isfinite(mass)).sum())
        raise NumericsError(
            f"the model's logits are not finite at {bad} of {mass.numel()} positions; its weights are broken or "
            "overflow in this dtype",
            positions=bad,
        )
    return logits - mass


def sample_tokens(logprobs: Tensor, settings: SamplingRows, draws: Tensor) -> Tensor:
    """Return one token id per row. [R] int64.

    Args:
        logprobs: `processed_logprobs` of the rows. [R, V]
        settings: Of the same rows; greedy rows take the most likely token (the lowest id of equals).
        draws: Uniforms in [0, 1). [R] float64
    """
    greedy = logprobs.argmax(dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    targets = (draws * cumulative[:, -1]).unsqueeze(-1)
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # A draw within rounding of 1 can land behind the last candidate.
    is_greedy = (settings.temperature == 0) | (drawn >= logprobs.shape[-1])
    return torch.where(is_greedy, greedy, drawn)


def _truncate(logprobs: Tensor, settings: SamplingRows) -> Tensor:
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    vocabulary = logprobs.shape[-1]
    last = torch.where(settings.top_k > 0, settings.top_k, vocabulary).clamp(max=vocabulary) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, last.unsqueeze(-1)), -torch.inf)
    ordered = torch.log_softmax(ordered, dim=-1)
    probs = ordered.exp()
    # The mass before a token, not with it, decides: so the token that reaches top_p is kept, and always one.
    mass_before = probs.cumsum(dim=-1) - probs
    is_outside = (mass_before >= settings.top_p.unsqueeze(-1)) & (settings.top_p < 1).unsqueeze(-1)
    ordered = torch.log_softmax(ordered.masked_fill(is_outside, -torch.inf), dim=-1)
    return torch.empty_like(ordered).scatter_(-1, order, ordered)
