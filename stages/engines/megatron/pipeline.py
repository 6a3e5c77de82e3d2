"""Micro-batches through the pipeline stages: one forward, one backward (1F1B) when there is a gradient to make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from stages.engines.training.row_tensors import RowTensors

_Batch = TypeVar("_Batch")


def run_pipeline(
    model: Any,  # noqa: ANN401 - PolicyStage in its wrapper
    batches: Sequence[_Batch],
    tensors_of: Callable[[_Batch], RowTensors],
    finish: Callable[[_Batch, Tensor, Tensor], Tensor],
    *,
    has_backward: bool,
) -> None:
    """Run micro-batches through this rank's stage; all ranks of a replica call it with the same batches.

    Args:
        model: This rank's stage.
        batches: At least one; they may differ in rows and length.
        tensors_of: Gives the rows of a batch.
        finish: Called on the last stage with a batch, its log-probs and their entropy (zeros without a backward
            pass), both [N]; returns the batch's share of the loss.
        has_backward: Whether gradients are accumulated; they are complete when the call returns.
    """

    def forward_step(iterator: Iterator[_Batch], stage: Any) -> tuple[Any, Callable[[Any], Any]]:  # noqa: ANN401
        batch = next(iterator)
        rows = tensors_of(batch)
        output = stage(
            rows.token_ids, rows.row_places, rows.hidden_index, rows.targets, rows.temperatures, has_backward
        )
        return output, partial(finish_batch, batch)

    def finish_batch(batch: _Batch, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor, dict[str, float]]:
        logprobs, entropy = output
        loss = finish(batch, logprobs, torch.zeros_like(logprobs) if entropy is None else entropy)
        # The count of tokens is for losses that are not divided yet.
        return loss, torch.zeros((), dtype=torch.int32, device=logprobs.device), {}

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        # Shapes of activations are sent along, as they vary.
        seq_length=1,
        micro_batch_size=1,
        forward_only=not has_backward,
    )
