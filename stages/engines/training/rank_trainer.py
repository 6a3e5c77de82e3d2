"""The policy's trainer as it runs on every rank: all ranks call the same method with the same arguments together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from stages.engines.protocol import OptimizerStepMetrics, ScoredTokens, TrainingOutcome, TrainingRequest
from stages.engines.training.learning_rate import learning_rate_at
from stages.engines.training.optimizer_step import StepResult, count_normaliser, make_micro_batches, run_backward
from stages.engines.training.parameter_groups import set_hyperparameters
from stages.engines.training.policy_module import PolicyModule, load_policy_module
from stages.engines.training.rank_model import RankModel
from stages.engines.training.row_tensors import RowTensors
from stages.engines.training.start_logprobs import StartLogprobs


class RankTrainer(RankModel):
    """Trains and scores a causal language model."""

    def load_module(self, dtype: torch.dtype) -> PolicyModule:
        """Return the policy module."""
        return load_policy_module(
            Path(self.settings.model_dir),
            dtype=dtype,
            is_recomputing=self.settings.is_recomputing,
            chunk_tokens=self.settings.logits_chunk_tokens,
            device=self.ranks.device,
        )

    def numbers_of(self, bare: nn.Module, tensors: RowTensors) -> torch.Tensor:
        """Return the log-prob of each completion token."""
        logprobs: torch.Tensor = bare(*tensors.inputs(), False)[0]
        return logprobs

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Log-probs of the completion tokens, [rows][completion tokens]."""
        scores = StartLogprobs(rows, self.ranks.device)
        self.score_into(scores, rows, range(len(rows)))
        return scores.to_lists()

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make every optimizer step of the request."""
        start = StartLogprobs(request.rows, self.ranks.device)
        self.score_into(start, request.rows, _rows_to_score(request))
        steps: list[OptimizerStepMetrics] = []
        skipped: list[str] = []
        for place, mini_batch in enumerate(request.mini_batches):
            step = self._optimizer_step(request, mini_batch, start)
            if place == 0 and not start.knows(mini_batch):
                start.share(mini_batch, self.ranks)
            steps.append(step)
            if step.is_skipped:
                skipped += [request.rows[row].row_id for row in mini_batch]
                self.stop_after_too_many(request.max_non_finite_steps, skipped)
        return TrainingOutcome(steps=steps, trainer_logprobs=start.to_lists(), skipped_row_ids=tuple(skipped))

    def _optimizer_step(
        self, request: TrainingRequest, mini_batch: Sequence[int], start: StartLogprobs
    ) -> OptimizerStepMetrics:
        index = self.counts.optimizer_step
        rate = learning_rate_at(request.optimizer, index, request.total_optimizer_steps)
        micro_batches = make_micro_batches(request, mini_batch, start, self.ranks)
        normaliser = count_normaliser(micro_batches, self.ranks, float(request.max_response_tokens or 1))
        set_hyperparameters(self.optimizer, request.optimizer, rate)
        result = run_backward(self.module, micro_batches, request, normaliser, start, self.ranks)
        if result.is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        in_a_row = 0 if result.is_finite else self.counts.non_finite_in_a_row + 1
        self.counts = replace(self.counts, optimizer_step=index + 1, non_finite_in_a_row=in_a_row)
        return _step_metrics(result, index, rate, len(mini_batch))


def _rows_to_score(request: TrainingRequest) -> list[int]:
    """Rows that need a forward pass of their own before the first optimizer step.

    The first step's rows don't: its own forward pass runs under the same weights. A masking correction is the
    exception, since it changes the counts that the first step's loss is divided by.
    """
    first = set() if request.correction.changes_counts else set(request.mini_batches[0])
    return [row for row in range(len(request.rows)) if row not in first]


def _step_metrics(result: StepResult, index: int, rate: float, num_rows: int) -> OptimizerStepMetrics:
    values = {**result.sums.metrics(), "grad_norm": result.grad_norm, "learning_rate": rate}
    return OptimizerStepMetrics(
        optimizer_step=index,
        is_skipped=not result.is_finite,
        num_rows=num_rows,
        num_tokens=int(result.sums.parts["num_tokens"]),
        values=values,
    )
