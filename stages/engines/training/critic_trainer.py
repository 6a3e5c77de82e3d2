"""The critic's trainer as it runs on every rank: values, and optimizer steps on the clipped value loss.

Losses are divided by the tokens of the whole optimizer step, so neither the split into micro-batches nor the number of
ranks changes loss or gradients (beyond rounding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from stages.engines.protocol import CriticOutcome, CriticRow, CriticTrainingRequest, OptimizerStepMetrics, ScoredTokens
from stages.engines.training.batching import pack_micro_batches, split_over_ranks
from stages.engines.training.learning_rate import learning_rate_at
from stages.engines.training.non_finite import stop_after_too_many
from stages.engines.training.parameter_groups import set_hyperparameters
from stages.engines.training.rank_model import RankModel
from stages.engines.training.row_tensors import RowTensors, make_row_tensors, pad_values, row_length
from stages.engines.training.start_logprobs import StartLogprobs
from stages.engines.training.value_module import ValueModule, load_value_module
from stages.engines.training.weight_sharding import whole_value
from stages.rl.aggregation import Normaliser
from stages.rl.value_loss import ValueSums, value_loss, value_sums


class CriticTrainer(RankModel):
    """Trains a value model and computes values."""

    def load_module(self, dtype: torch.dtype, device: torch.device) -> ValueModule:
        """Return the value module."""
        return load_value_module(
            Path(self.settings.model_dir),
            dtype=dtype,
            is_recomputing=self.settings.is_recomputing,
            device=device,
        )

    def numbers_of(self, bare: nn.Module, tensors: RowTensors) -> torch.Tensor:
        """Return the value before each completion token."""
        values: torch.Tensor = bare(*tensors.state_inputs())
        return values

    def values(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Values of the completion tokens, [rows][completion tokens]."""
        found = StartLogprobs(rows, self.ranks.device)
        self.score_into(found, rows, range(len(rows)))
        return found.to_lists()

    def train_critic(self, request: CriticTrainingRequest) -> CriticOutcome:
        """Make every optimizer step of the request."""
        steps: list[OptimizerStepMetrics] = []
        skipped: list[str] = []
        for mini_batch in request.mini_batches:
            step = self._optimizer_step(request, mini_batch)
            steps.append(step)
            if step.is_skipped:
                skipped += [request.rows[row].row_id for row in mini_batch]
                stop_after_too_many(self.counts, request.max_non_finite_steps, skipped)
        return CriticOutcome(steps=steps, skipped_row_ids=tuple(skipped))

    def _optimizer_step(self, request: CriticTrainingRequest, mini_batch: Sequence[int]) -> OptimizerStepMetrics:
        index = self.counts.optimizer_step
        rate = learning_rate_at(request.optimizer, index, request.total_optimizer_steps)
        set_hyperparameters(self.optimizer, request.optimizer, rate)
        loss, sums, grad_norm = self._backward(request, mini_batch)
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        in_a_row = 0 if is_finite else self.counts.non_finite_in_a_row + 1
        self.counts = replace(self.counts, optimizer_step=index + 1, non_finite_in_a_row=in_a_row)
        return OptimizerStepMetrics(
            optimizer_step=index,
            is_skipped=not is_finite,
            num_rows=len(mini_batch),
            num_tokens=int(sums.num_tokens),
            values={"value_loss": loss / request.value_weight, **sums.metrics(), "grad_norm": grad_norm,
                    "learning_rate": rate},
        )  # fmt: skip

    def _backward(self, request: CriticTrainingRequest, mini_batch: Sequence[int]) -> tuple[float, ValueSums, float]:
        """Accumulate the step's gradient; return loss, sums and gradient norm, the same on every rank."""
        ranks, accelerator = self.ranks, self.ranks.accelerator
        tokens = float(sum(len(request.rows[row].completion_token_ids) for row in mini_batch))
        normaliser = Normaliser(num_tokens=tokens, num_sequences=float(len(mini_batch)), max_response_tokens=1.0)
        packs = self._packs(request, mini_batch)
        loss_share, sums = 0.0, ValueSums()
        for place, (pack, is_counted) in enumerate(packs):
            rows = [request.rows[row] for row in pack]
            with nullcontext() if place == len(packs) - 1 else accelerator.no_sync(self.module):
                loss, part = self._micro_step(request, rows, normaliser, is_counted=is_counted)
                # Data-parallel wrappers take the mean over ranks; the tokens of all ranks are counted already.
                accelerator.backward(loss * ranks.place.num_ranks)
            loss_share += float(loss.detach())
            sums = sums + part
        norm = float(
            whole_value(accelerator.clip_grad_norm_(self.module.parameters(), request.optimizer.max_grad_norm))
        )
        totals = ranks.sum_mapping({"loss": loss_share, **sums.to_mapping()})
        # A maximum over ranks may drop NaN.
        norm = ranks.max_floats([norm if math.isfinite(norm) else math.inf])[0]
        return totals.pop("loss"), ValueSums(**totals), norm

    def _micro_step(
        self, request: CriticTrainingRequest, rows: Sequence[CriticRow], normaliser: Normaliser, *, is_counted: bool
    ) -> tuple[torch.Tensor, ValueSums]:
        tensors = make_row_tensors(rows, self.ranks.device)
        values = tensors.to_rows(self.module(*tensors.state_inputs()))
        if not is_counted:
            # A rank without rows: nothing counts, but its backward pass takes part in the reduction.
            return values.sum() * 0.0, ValueSums()
        width = tensors.mask.shape[1]
        old = pad_values([row.old_values for row in rows], width, self.ranks.device)
        returns = pad_values([row.returns for row in rows], width, self.ranks.device)
        loss = value_loss(values, old, returns, tensors.mask, normaliser, request.value_clip)
        return loss * request.value_weight, value_sums(values.detach(), old, returns, tensors.mask, request.value_clip)

    def _packs(self, request: CriticTrainingRequest, mini_batch: Sequence[int]) -> list[tuple[list[int], bool]]:
        """Return this rank's micro-batches and whether they count; at least one, as ranks synchronise in the last."""
        lengths = [row_length(row) for row in request.rows]
        mine = split_over_ranks(mini_batch, lengths, self.ranks.place.num_ranks)[self.ranks.place.rank]
        idle = ([min(mini_batch, key=lambda row: (lengths[row], row))], False)
        prompts = [tuple(row.prompt_token_ids) for row in request.rows]
        packs = [(pack, True) for pack in pack_micro_batches(mine, lengths, request.micro_batch_tokens, prompts)]
        return self.as_many_as_others(packs or [idle], idle)
