"""Checks of what a caller hands to the trainer, before any rank sees it. All faults are reported together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stages.engines.protocol import CriticTrainingRequest, ScoredTokens, TrainingRequest, TrainingRow
from stages.engines.training.row_tensors import Row, row_length
from stages.errors import ContractError


def check_rows(rows: Sequence[Row], *, vocab_size: int, max_sequence_tokens: int) -> None:
    """Refuse rows that the model can't take.

    Args:
        rows: Rows to score or to train on.
        vocab_size: Token ids are below it.
        max_sequence_tokens: Longest prompt and completion together.

    Raises:
        ContractError: Names every fault (the first 20).
    """
    _raise_faults(
        fault for place, row in enumerate(rows) for fault in _row_faults(place, row, vocab_size, max_sequence_tokens)
    )


def check_training_request(request: TrainingRequest, *, vocab_size: int, max_sequence_tokens: int) -> None:
    """Refuse a request that can't be trained on.

    Raises:
        ContractError: Names every fault (the first 20).
    """
    _raise_faults(_request_faults(request, vocab_size, max_sequence_tokens))


def check_critic_request(request: CriticTrainingRequest, *, vocab_size: int, max_sequence_tokens: int) -> None:
    """Refuse a critic's request that can't be trained on.

    Raises:
        ContractError: Names every fault (the first 20).
    """
    _raise_faults(_critic_faults(request, vocab_size, max_sequence_tokens))


def _critic_faults(request: CriticTrainingRequest, vocab_size: int, max_sequence_tokens: int) -> Iterator[str]:
    yield from _mini_batch_faults(request.mini_batches, len(request.rows))
    for place, row in enumerate(request.rows):
        yield from _row_faults(place, row, vocab_size, max_sequence_tokens)
        tokens = len(row.completion_token_ids)
        for name, numbers in (("old_values", row.old_values), ("returns", row.returns)):
            if len(numbers) != tokens:
                yield f"{row.row_id} has {len(numbers)} {name} for {tokens} completion tokens"


def _mini_batch_faults(mini_batches: Sequence[Sequence[int]], num_rows: int) -> Iterator[str]:
    if not mini_batches:
        yield "mini_batches is empty: give at least one optimizer step"
    for place, mini_batch in enumerate(mini_batches):
        outside = [row for row in mini_batch if not 0 <= row < num_rows]
        if outside or not mini_batch:
            yield f"mini_batches[{place}] must name at least one of the {num_rows} rows, found {outside[:3]}"
        elif len(set(mini_batch)) != len(mini_batch):
            yield f"mini_batches[{place}] names a row twice"


def _request_faults(request: TrainingRequest, vocab_size: int, max_sequence_tokens: int) -> Iterator[str]:
    yield from _mini_batch_faults(request.mini_batches, len(request.rows))
    if request.grpo.loss_aggregation == "sequence_mean_token_sum_norm" and request.max_response_tokens is None:
        yield "grpo.loss_aggregation sequence_mean_token_sum_norm divides by max_response_tokens, which is missing"
    for place, row in enumerate(request.rows):
        yield from _row_faults(place, row, vocab_size, max_sequence_tokens)
        yield from _training_row_faults(row, needs_reference=request.grpo.kl.loss_weight > 0.0)


def _row_faults(place: int, row: Row, vocab_size: int, max_sequence_tokens: int) -> Iterator[str]:
    name = f"rows[{place}]" if isinstance(row, ScoredTokens) else row.row_id
    if not row.prompt_token_ids or not row.completion_token_ids:
        yield f"{name} needs at least one prompt token and one completion token"
        return
    if row_length(row) > max_sequence_tokens:
        yield f"{name} has {row_length(row)} tokens, the engine takes at most {max_sequence_tokens}"
    highest = max(max(row.prompt_token_ids), max(row.completion_token_ids))
    lowest = min(min(row.prompt_token_ids), min(row.completion_token_ids))
    if highest >= vocab_size or lowest < 0:
        yield f"{name} has token ids from {lowest} to {highest}, the vocabulary has 0 to {vocab_size - 1}"
    if not row.temperature > 0.0:
        yield f"{name} has temperature {row.temperature}, which must be over 0"


def _training_row_faults(row: TrainingRow, *, needs_reference: bool) -> Iterator[str]:
    tokens = len(row.completion_token_ids)
    if len(row.sampler_logprobs) != tokens:
        yield f"{row.row_id} has {len(row.sampler_logprobs)} sampler_logprobs for {tokens} completion tokens"
    if row.token_advantages is not None and len(row.token_advantages) != tokens:
        yield f"{row.row_id} has {len(row.token_advantages)} token_advantages for {tokens} completion tokens"
    if row.reference_logprobs is None:
        if needs_reference:
            yield f"{row.row_id} has no reference_logprobs although grpo.kl.weight is not 0"
    elif len(row.reference_logprobs) != tokens:
        yield f"{row.row_id} has {len(row.reference_logprobs)} reference_logprobs for {tokens} completion tokens"


def _raise_faults(faults: Iterator[str]) -> None:
    found = list(faults)
    if found:
        listing = "; ".join(found[:20]) + (f"; and {len(found) - 20} more" if len(found) > 20 else "")
        raise ContractError(
            f"the rows handed to the training engine have {len(found)} fault(s): {listing}", faults=found[:20]
        )
