"""What one writes by hand: a transformers model, padded rows, AdamW; DistributedDataParallel for two processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from stages.engines.protocol import TrainingRequest, TrainingRow
from stages.engines.training.parameter_groups import make_adamw, set_hyperparameters
from stages.spec.execution import OptimizerSpec


class PlainLoop:
    """One rank; every rank takes every n-th row, longest first."""

    def __init__(self, model_dir: Path, rank: int, num_ranks: int, store_path: Path) -> None:
        self._num_ranks = num_ranks
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.model.train()
        self._optimizer = make_adamw(self.model)
        self._module: Any = self.model
        self._rank = rank
        if num_ranks > 1:
            store = dist.FileStore(str(store_path), num_ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
            self._module = DistributedDataParallel(self.model)

    def step(self, request: TrainingRequest) -> tuple[float, float]:
        """Make one optimizer step over all rows; return loss and gradient norm."""
        lengths = {row.row_id: _length(row) for row in request.rows}
        ordered = sorted(request.rows, key=lambda row: -lengths[row.row_id])
        batches = _batches(ordered[self._rank :: self._num_ranks], request.micro_batch_tokens)
        num_tokens = sum(len(row.completion_token_ids) for row in request.rows)
        loss = torch.zeros(())
        for place, rows in enumerate(batches):
            is_last = place == len(batches) - 1
            with nullcontext() if is_last or self._num_ranks == 1 else self._module.no_sync():
                share = self._loss(rows) / num_tokens
                (share * self._num_ranks).backward()
            loss += share.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), request.optimizer.max_grad_norm)
        self._update(request.optimizer)
        if self._num_ranks > 1:
            dist.all_reduce(loss)
        return float(loss), float(norm)

    def _update(self, spec: OptimizerSpec) -> None:
        set_hyperparameters(self._optimizer, spec, spec.learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _loss(self, rows: Sequence[TrainingRow]) -> Tensor:
        """Sum over completion tokens of minus advantage times importance ratio, which is 1 on policy."""
        width = max(_length(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask, counted = torch.zeros_like(ids), torch.zeros(len(rows), width - 1)
        for place, row in enumerate(rows):
            tokens = [*row.prompt_token_ids, *row.completion_token_ids]
            ids[place, : len(tokens)] = torch.tensor(tokens)
            mask[place, : len(tokens)] = 1
            counted[place, len(row.prompt_token_ids) - 1 : len(tokens) - 1] = row.advantage
        logits = self._module(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return -(counted * (logprobs - logprobs.detach()).exp()).sum()


def _length(row: TrainingRow) -> int:
    return len(row.prompt_token_ids) + len(row.completion_token_ids)


def _batches(rows: Sequence[TrainingRow], most_tokens: int) -> list[list[TrainingRow]]:
    """Cut rows, longest first, into batches of at most so many padded tokens."""
    batches: list[list[TrainingRow]] = []
    for row in rows:
        if batches and (len(batches[-1]) + 1) * _length(batches[-1][0]) <= most_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
