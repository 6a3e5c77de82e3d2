"""How token losses become one number, with normalisers counted over the whole optimizer step.

The caller counts once over all micro-batches and ranks (`count_normaliser`, added up) and passes the same counts to
every call; the results then add up to one loss that depends neither on the micro-batch split nor on the number of
ranks. A trainer whose gradients are averaged over ranks multiplies by their number.

Legend of shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from stages.rl.masks import masked_mean, masked_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """Counts over all micro-batches and ranks of one optimizer step."""

    num_tokens: float
    """Unmasked response tokens."""

    num_sequences: float
    """Responses with at least one unmasked token."""

    max_response_tokens: float
    """Constant length that `sequence_mean_token_sum_norm` divides by: the response limit of the job, tokens, > 0."""

    def __add__(self, other: Normaliser) -> Normaliser:
        """Counts of both parts; the constant must agree."""
        if self.max_response_tokens != other.max_response_tokens:
            raise ValueError(
                f"normalisers with max_response_tokens {self.max_response_tokens} and {other.max_response_tokens} "
                "don't belong to one optimizer step: pass the response limit of the job to both"
            )
        return Normaliser(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            max_response_tokens=self.max_response_tokens,
        )


def count_normaliser(mask: Tensor, max_response_tokens: float) -> Normaliser:
    """Counts of one mask [B, T]; add the parts up (or all-reduce both counts) before use."""
    return Normaliser(
        num_tokens=float(mask.sum().item()),
        num_sequences=float(mask.any(dim=-1).sum().item()),
        max_response_tokens=max_response_tokens,
    )


def token_mean(token_losses: Tensor, mask: Tensor, normaliser: Normaliser) -> Tensor:
    """Every token counts the same: sum over tokens / number of tokens of the step (DAPO, equation 8)."""
    return masked_sum(token_losses, mask) / max(normaliser.num_tokens, 1.0)


def sequence_mean_token_mean(token_losses: Tensor, mask: Tensor, normaliser: Normaliser) -> Tensor:
    """Every response counts the same: mean over its tokens, then over responses (GRPO as published)."""
    return masked_mean(token_losses, mask, dim=-1).sum() / max(normaliser.num_sequences, 1.0)


def sequence_mean_token_sum_norm(token_losses: Tensor, mask: Tensor, normaliser: Normaliser) -> Tensor:
    """Sum over tokens / (responses * constant length): no bias towards short answers (Dr. GRPO, equation 3)."""
    return masked_sum(token_losses, mask) / (max(normaliser.num_sequences, 1.0) * normaliser.max_response_tokens)


AGGREGATIONS: Final[Mapping[str, Callable[[Tensor, Tensor, Normaliser], Tensor]]] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
}
"""Aggregation by its name in `GrpoSpec.loss_aggregation`."""


def aggregate(token_losses: Tensor, mask: Tensor, mode: str, normaliser: Normaliser) -> Tensor:
    """This part's share of the step's loss; 0 (with a zero gradient) when the mask is empty.

    Args:
        token_losses: [B, T].
        mask: [B, T], bool; the mask that `normaliser` was counted from.
        mode: A key of `AGGREGATIONS`.
        normaliser: Counts over the whole optimizer step.

    Returns:
        Scalar.
    """
    return AGGREGATIONS[mode](token_losses, mask, normaliser)
