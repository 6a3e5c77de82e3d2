"""One optimizer step: micro-batches of this rank, gradients of all ranks, clip, update or skip.

Every token's loss is divided by counts over the whole step, all micro-batches and ranks together, so neither the split
into micro-batches nor the number of ranks changes loss or gradients (beyond rounding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.engines.protocol import TrainingRequest, TrainingRow
from stages.engines.training.batching import pack_micro_batches
from stages.engines.training.rank_group import RankGroup
from stages.engines.training.ranks import Ranks
from stages.engines.training.row_tensors import RowTensors, make_row_tensors, pad_values, row_length
from stages.engines.training.start_logprobs import StartLogprobs
from stages.engines.training.step_sums import StepSums
from stages.engines.training.weight_sharding import whole_value
from stages.rl.aggregation import Normaliser
from stages.rl.importance import Correction, importance_correction
from stages.rl.losses import PolicyBatch, policy_loss
from stages.rl.masks import zero_outside


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass."""

    row_indices: Sequence[int]
    """Rows of the request."""
    tensors: RowTensors
    advantages: Tensor
    """[B, 1], or [B, T] where tokens have advantages of their own."""
    sampler_logprobs: Tensor
    """[B, T]."""
    reference_logprobs: Tensor | None
    """[B, T], or None without a KL penalty."""
    start_logprobs: Tensor | None
    """[B, T], under the weights at the start of the call; None = this pass itself gives them."""
    correction: Correction | None
    """Known when `start_logprobs` is."""
    real_tokens: int
    """Tokens without padding."""

    @property
    def mask(self) -> Tensor:
        """[B, T], tokens that count in the loss."""
        return self.tensors.mask if self.correction is None else self.correction.mask


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of the backward passes of one optimizer step, the same on every rank."""

    sums: StepSums
    grad_norm: float
    """Norm of the whole gradient before clipping."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite numbers."""
        return math.isfinite(self.sums.loss) and math.isfinite(self.grad_norm)


def make_micro_batches(
    request: TrainingRequest, mini_batch: Sequence[int], mine: Sequence[int], start: StartLogprobs, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches of this rank; at least one, possibly of rows that don't count, so that all ranks synchronise.

    Args:
        request: What is trained on.
        mini_batch: Rows of the optimizer step.
        mine: Those of this rank; may be none.
        start: Log-probs under the starting weights, as far as they are known.
        device: Where the tensors go.
    """
    lengths = [row_length(row) for row in request.rows]
    if not mine:
        return [idle_micro_batch(request, mini_batch, device)]
    prompts = [tuple(row.prompt_token_ids) for row in request.rows]
    packs = pack_micro_batches(mine, lengths, request.micro_batch_tokens, prompts)
    return [_micro_batch(request, pack, start, device) for pack in packs]


def count_normaliser(micro_batches: Sequence[MicroBatch], ranks: RankGroup, max_response_tokens: float) -> Normaliser:
    """Counts over all micro-batches of all ranks that count."""
    tokens = float(sum(int(micro.mask.sum()) for micro in micro_batches))
    sequences = float(sum(int(micro.mask.any(dim=-1).sum()) for micro in micro_batches))
    tokens, sequences = ranks.sum_floats([tokens, sequences])
    return Normaliser(num_tokens=tokens, num_sequences=sequences, max_response_tokens=max_response_tokens)


def run_backward(
    module: Any,  # noqa: ANN401 - PolicyModule, perhaps inside a data-parallel wrapper
    micro_batches: Sequence[MicroBatch],
    request: TrainingRequest,
    normaliser: Normaliser,
    start: StartLogprobs,
    ranks: Ranks,
) -> StepResult:
    """Accumulate the gradient of one optimizer step over micro-batches and ranks, and clip it."""
    accelerator = ranks.accelerator
    sums = StepSums()
    for place, micro in enumerate(micro_batches):
        is_last = place == len(micro_batches) - 1
        # Ranks of DDP may have different numbers of micro-batches; each synchronises exactly once, in its last.
        with nullcontext() if is_last else accelerator.no_sync(module):
            logprobs, entropy = module(*micro.tensors.inputs(), True)
            loss = micro_batch_loss(micro, logprobs, entropy, request, normaliser, start, sums)
            # Data-parallel wrappers take the mean over ranks, the normaliser has counted all ranks already.
            accelerator.backward(loss * ranks.place.num_ranks)
    norm = accelerator.clip_grad_norm_(module.parameters(), request.optimizer.max_grad_norm)
    return StepResult(sums=sums.over_ranks(ranks), grad_norm=ranks.max_floats([poisoned(float(whole_value(norm)))])[0])


def poisoned(norm: float) -> float:
    """Return the norm, or infinity for NaN, since a maximum over ranks may drop NaN."""
    return norm if math.isfinite(norm) else math.inf


def micro_batch_loss(
    micro: MicroBatch,
    flat_logprobs: Tensor,
    flat_entropy: Tensor,
    request: TrainingRequest,
    normaliser: Normaliser,
    start: StartLogprobs,
    sums: StepSums,
) -> Tensor:
    """Return a micro-batch's share of the step's loss; adds its measurements to `sums`, its log-probs to `start`.

    Args:
        micro: The micro-batch.
        flat_logprobs: [N], log-probs of its completion tokens, row by row.
        flat_entropy: [N], entropy at the same places.
        request: What is trained on.
        normaliser: Counts of the whole step.
        start: Takes the log-probs if this pass is the one under the starting weights.
        sums: Takes the measurements.
    """
    tensors = micro.tensors
    logprobs = tensors.to_rows(flat_logprobs)
    if micro.row_indices and micro.start_logprobs is None:
        start.put(micro.row_indices, flat_logprobs.detach())
    start_logprobs = logprobs.detach() if micro.start_logprobs is None else micro.start_logprobs
    correction = micro.correction or importance_correction(
        start_logprobs, micro.sampler_logprobs, tensors.mask, request.correction
    )
    if not micro.row_indices:
        # A rank without rows: nothing counts, but its backward pass takes part in the reduction.
        return logprobs.sum() * 0.0
    entropy = tensors.to_rows(flat_entropy if request.grpo.entropy_weight > 0.0 else flat_entropy.detach())
    is_coupled = request.correction.clip_around == "behaviour"
    is_weighted = request.correction.mode != "none" or request.correction.reject is not None
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=micro.sampler_logprobs if is_coupled else start_logprobs,
        advantages=micro.advantages,
        mask=correction.mask,
        reference_logprobs=micro.reference_logprobs,
        correction_weights=correction.weights if is_weighted else None,
        entropy=entropy,
    )
    result = policy_loss(batch, request.grpo, normaliser)
    sums.add_loss(result.loss, result.sums)
    _describe(sums, micro, logprobs.detach(), start_logprobs, correction)
    return result.loss


def _describe(
    sums: StepSums, micro: MicroBatch, logprobs: Tensor, start_logprobs: Tensor, correction: Correction
) -> None:
    mask = micro.tensors.mask
    sums.num_rows += len(micro.row_indices)
    sums.num_micro_batches += 1
    sums.padded_tokens += micro.tensors.row_places.numel()
    sums.real_tokens += micro.real_tokens
    sums.importance = sums.importance + correction.stats
    sums.add_gap(start_logprobs, micro.sampler_logprobs, mask)
    if mask.any():
        log_ratio = zero_outside(logprobs, mask) - zero_outside(start_logprobs, mask)
        sums.max_log_ratio = max(sums.max_log_ratio, float(log_ratio.masked_fill(~mask, -math.inf).max()))
        sums.max_weight = max(sums.max_weight, float(correction.weights.max()))


def _micro_batch(
    request: TrainingRequest, pack: Sequence[int], start: StartLogprobs, device: torch.device
) -> MicroBatch:
    rows = [request.rows[index] for index in pack]
    tensors = make_row_tensors(rows, device)
    width = tensors.mask.shape[1]
    sampler = pad_values([row.sampler_logprobs for row in rows], width, device)
    known = start.take(pack, tensors) if start.knows(pack) else None
    correction = None if known is None else importance_correction(known, sampler, tensors.mask, request.correction)
    return MicroBatch(
        row_indices=pack,
        tensors=tensors,
        advantages=_advantages(rows, width, device),
        sampler_logprobs=sampler,
        reference_logprobs=_reference(rows, width, device),
        start_logprobs=known,
        correction=correction,
        real_tokens=sum(row_length(row) - 1 for row in rows),
    )


def _advantages(rows: Sequence[TrainingRow], width: int, device: torch.device) -> Tensor:
    by_token = [row.token_advantages for row in rows if row.token_advantages is not None]
    if len(by_token) == len(rows):
        return pad_values(by_token, width, device)
    return torch.tensor([[row.advantage] for row in rows], dtype=torch.float32, device=device)


def _reference(rows: Sequence[TrainingRow], width: int, device: torch.device) -> Tensor | None:
    values = [row.reference_logprobs for row in rows if row.reference_logprobs is not None]
    return pad_values(values, width, device) if len(values) == len(rows) else None


def idle_micro_batch(request: TrainingRequest, row_indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Return a pass in which nothing counts, over the shortest of some rows, for a rank that only takes part."""
    row = min(row_indices, key=lambda index: (row_length(request.rows[index]), index))
    tensors = make_row_tensors([request.rows[row]], device)
    nothing = torch.zeros_like(tensors.mask)
    values = torch.zeros(tensors.mask.shape, dtype=torch.float32, device=device)
    correction = importance_correction(values, values, nothing, request.correction)
    return MicroBatch(
        row_indices=(),
        tensors=tensors,
        advantages=values[:, :1],
        sampler_logprobs=values,
        reference_logprobs=None,
        start_logprobs=values,
        correction=correction,
        real_tokens=0,
    )
