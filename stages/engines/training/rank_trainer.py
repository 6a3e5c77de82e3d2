"""The trainer as it runs on every rank: all ranks call the same method with the same arguments at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from stages.engines.protocol import OptimizerStepMetrics, ScoredTokens, TrainingOutcome, TrainingRequest
from stages.engines.training.batching import pack_micro_batches, split_over_ranks
from stages.engines.training.learning_rate import learning_rate_at
from stages.engines.training.optimizer_step import StepResult, count_normaliser, make_micro_batches, run_backward
from stages.engines.training.parameter_groups import make_adamw, set_hyperparameters
from stages.engines.training.policy_files import read_weights_into, write_serving_directory
from stages.engines.training.policy_module import load_policy_module
from stages.engines.training.ranks import RankPlace, Ranks
from stages.engines.training.resume_point import (
    TrainerCounts,
    read_random_state,
    read_trainer_files,
    write_random_state,
    write_trainer_files,
)
from stages.engines.training.row_tensors import Row, make_row_tensors, row_length
from stages.engines.training.start_logprobs import StartLogprobs
from stages.errors import ContractError, NumericsError

Precision = Literal["fp32", "bf16-mixed", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """What every rank needs to know; plain values, so that they can be sent to another process."""

    model_dir: str
    """Hugging Face directory of the first weights, the config and the tokenizer."""
    precision: Precision = "fp32"
    """`fp32`; `bf16-mixed`: fp32 weights, bf16 products; `bf16`: bf16 weights, gradients and moments (steps under 1/256
    of a weight are lost to rounding)."""
    serving_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of saved weights."""
    is_recomputing: bool = False
    """Whether activations are recomputed in the backward pass."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    """Torch threads of this rank."""
    seed: int = 0
    """Seed of this engine's random numbers."""
    logits_chunk_tokens: int = 1024
    """Tokens whose logits exist at once."""
    score_batch_tokens: int = 16384
    """Padded tokens per forward pass without gradients."""


class RankTrainer:
    """Holds one rank's copy of the weights and of the optimizer."""

    def __init__(self, settings: TrainerSettings, place: RankPlace, store: Any = None) -> None:  # noqa: ANN401
        """Load the model and meet the other ranks."""
        self.settings = settings
        mixed = "bf16" if settings.precision == "bf16-mixed" else "no"
        self.ranks = Ranks(place, device=settings.device, mixed_precision=mixed, store=store)
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed * 1_000_003 + place.rank)
        module = load_policy_module(
            Path(settings.model_dir),
            dtype=_DTYPES.get(settings.precision, torch.float32),
            is_recomputing=settings.is_recomputing,
            chunk_tokens=settings.logits_chunk_tokens,
            device=self.ranks.device,
        )
        self.model = module.model
        self.module: Any = self.ranks.accelerator.prepare_model(module)
        self._optimizer: torch.optim.Optimizer | None = None
        self.counts = TrainerCounts()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below it."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def load_weights(self, directory: str) -> None:
        """Replace the weights and forget optimizer and counts."""
        read_weights_into(self.model, Path(directory))
        self._optimizer, self.counts = None, TrainerCounts()
        self.ranks.barrier()

    def load_checkpoint(self, policy_dir: str, trainer_dir: str | None) -> None:
        """Replace weights and, from `trainer_dir`, optimizer, counts and random states."""
        self.load_weights(policy_dir)
        if trainer_dir is not None:
            self.counts = read_trainer_files(Path(trainer_dir), self.model, self.optimizer)
            read_random_state(Path(trainer_dir), self.ranks.place.rank)
        self.ranks.barrier()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW; made on first use, so that an engine that only scores has none."""
        if self._optimizer is None:
            self._optimizer = make_adamw(self.model)
        return self._optimizer

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Log-probs of the completion tokens, [rows][completion tokens]."""
        scores = StartLogprobs(rows, self.ranks.device)
        self._score_into(scores, rows, range(len(rows)))
        return scores.to_lists()

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make every optimizer step of the request."""
        start = StartLogprobs(request.rows, self.ranks.device)
        self._score_into(start, request.rows, _rows_to_score(request))
        steps: list[OptimizerStepMetrics] = []
        skipped: list[str] = []
        for place, mini_batch in enumerate(request.mini_batches):
            step = self._optimizer_step(request, mini_batch, start)
            if place == 0 and not start.knows(mini_batch):
                start.share(mini_batch, self.ranks)
            steps.append(step)
            if step.is_skipped:
                skipped += [request.rows[row].row_id for row in mini_batch]
                self._stop_after_too_many(request, skipped)
        return TrainingOutcome(steps=steps, trainer_logprobs=start.to_lists(), skipped_row_ids=tuple(skipped))

    def save(self, policy_dir: str, trainer_dir: str, policy_version: int) -> None:
        """Write serving weights and resume point; each directory appears at once, when it is complete."""
        serving = _DTYPES[self.settings.serving_dtype]
        is_rounded = serving != self.model.dtype
        final = (Path(policy_dir), Path(trainer_dir))
        with _staged(final, self.ranks) as (policy, trainer):
            write_random_state(trainer, self.ranks.place.rank)
            if self.ranks.place.rank == 0:
                write_serving_directory(self.model, Path(self.settings.model_dir), policy, serving)
                write_trainer_files(
                    trainer, self.model, self.optimizer, self.counts, has_weights=is_rounded,
                    num_ranks=self.ranks.place.num_ranks, policy_version=policy_version,
                )  # fmt: skip

    def close(self) -> None:
        """Leave the other ranks."""
        self.ranks.close()

    def _score_into(self, scores: StartLogprobs, rows: Sequence[Row], row_indices: Sequence[int]) -> None:
        if not row_indices:
            return
        lengths = [row_length(row) for row in rows]
        mine = split_over_ranks(row_indices, lengths, self.ranks.place.num_ranks)[self.ranks.place.rank]
        prompts = [tuple(row.prompt_token_ids) for row in rows]
        for pack in pack_micro_batches(mine, lengths, self.settings.score_batch_tokens, prompts):
            tensors = make_row_tensors([rows[row] for row in pack], self.ranks.device)
            # The wrapped module would count a forward pass without a backward one; autocast is set here instead.
            with torch.no_grad(), self.ranks.accelerator.autocast():
                flat, _ = self._bare_module()(*tensors.inputs(), False)
            scores.put(pack, flat)
        scores.share(row_indices, self.ranks)

    def _bare_module(self) -> Any:  # noqa: ANN401 - PolicyModule
        return self.ranks.accelerator.unwrap_model(self.module, keep_fp32_wrapper=True)

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

    def _stop_after_too_many(self, request: TrainingRequest, skipped: Sequence[str]) -> None:
        count = self.counts.non_finite_in_a_row
        if count < request.max_non_finite_steps:
            return
        raise NumericsError(
            f"loss or gradient was not finite in {count} optimizer steps in a row (allowed: fewer than "
            f"{request.max_non_finite_steps}), last in step {self.counts.optimizer_step - 1}: look at the rows named "
            "in row_ids, lower the learning rate, or resume from an earlier policy version",
            row_ids=list(skipped),
            optimizer_step=self.counts.optimizer_step - 1,
            num_steps=count,
        )


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


@contextmanager
def _staged(final: tuple[Path, Path], ranks: Ranks) -> Iterator[tuple[Path, Path]]:
    """Directories beside the final ones, renamed by rank 0 when all ranks have written; removed on failure."""
    staged = (final[0].with_name(f".{final[0].name}.partial"), final[1].with_name(f".{final[1].name}.partial"))
    if ranks.place.rank == 0:
        for path, stage in zip(final, staged, strict=True):
            if path.exists():
                raise ContractError(f"{path} exists already: save writes fresh directories only", path=str(path))
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir(parents=True)
    ranks.barrier()
    try:
        yield staged
        ranks.barrier()
        if ranks.place.rank == 0:
            for path, stage in zip(final, staged, strict=True):
                stage.rename(path)
        ranks.barrier()
    finally:
        if ranks.place.rank == 0:
            for stage in staged:
                shutil.rmtree(stage, ignore_errors=True)
