"""The policy's trainer on accelerate, as it runs on every rank: data parallel, weights whole on each or spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from stages.engines.protocol import TrainingRequest
from stages.engines.training.batching import split_over_ranks
from stages.engines.training.optimizer_step import MicroBatch, StepResult, idle_micro_batch, run_backward
from stages.engines.training.parameter_groups import set_hyperparameters
from stages.engines.training.policy_module import PolicyModule, load_policy_module
from stages.engines.training.policy_steps import PolicySteps
from stages.engines.training.rank_group import RankGroup
from stages.engines.training.rank_model import RankModel
from stages.engines.training.row_tensors import RowTensors
from stages.engines.training.start_logprobs import StartLogprobs
from stages.rl.aggregation import Normaliser
from stages.spec.execution import OptimizerSpec


class RankTrainer(RankModel, PolicySteps):
    """Trains and scores a causal language model."""

    @property
    def group(self) -> RankGroup:
        """All ranks; each computes rows of its own."""
        return self.ranks

    def load_module(self, dtype: torch.dtype, device: torch.device) -> PolicyModule:
        """Return the policy module."""
        return load_policy_module(
            Path(self.settings.model_dir),
            dtype=dtype,
            is_recomputing=self.settings.is_recomputing,
            chunk_tokens=self.settings.logits_chunk_tokens,
            device=device,
        )

    def numbers_of(self, bare: nn.Module, tensors: RowTensors) -> torch.Tensor:
        """Return the log-prob of each completion token."""
        logprobs: torch.Tensor = bare(*tensors.inputs(), False)[0]
        return logprobs

    def my_rows(self, row_indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return this rank's even share of some rows."""
        return split_over_ranks(row_indices, lengths, self.ranks.num_ranks)[self.ranks.rank]

    def set_rate(self, spec: OptimizerSpec, learning_rate: float) -> None:
        """Set what the next update uses."""
        set_hyperparameters(self.optimizer, spec, learning_rate)

    def backward(
        self, micro_batches: Sequence[MicroBatch], request: TrainingRequest, normaliser: Normaliser,
        start: StartLogprobs,
    ) -> StepResult:  # fmt: skip
        """Accumulate the gradient over micro-batches and ranks, and clip it."""
        idle = idle_micro_batch(request, range(len(request.rows)), self.ranks.device)
        passes = self.as_many_as_others([*micro_batches], idle)
        return run_backward(self.module, passes, request, normaliser, start, self.ranks)

    def finish_step(self, *, is_applied: bool) -> None:
        """Update the weights, or leave them alone, and drop the gradient."""
        if is_applied:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
