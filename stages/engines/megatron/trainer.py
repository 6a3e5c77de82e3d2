"""The policy's trainer on megatron-core, as it runs on every rank of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import distributed as dist
from torch import nn

from stages.engines.megatron.cpu_shim import megatron_on
from stages.engines.megatron.layout import RANK_ORDER, MegatronLayout
from stages.engines.megatron.model_config import read_model_config
from stages.engines.megatron.pipeline import run_pipeline
from stages.engines.megatron.policy_stage import PolicyStage, transformer_config
from stages.engines.megatron.resume import LayoutFiles
from stages.engines.megatron.sharded_adam import ShardedAdam
from stages.engines.protocol import ScoredTokens, TrainingOutcome, TrainingRequest
from stages.engines.training.batching import pack_micro_batches, split_by_shares
from stages.engines.training.optimizer_step import MicroBatch, StepResult, micro_batch_loss, poisoned
from stages.engines.training.policy_steps import PolicySteps
from stages.engines.training.rank_group import RankGroup
from stages.engines.training.rank_model import TrainerSettings
from stages.engines.training.rank_place import RankPlace
from stages.engines.training.ranks import join_process_group
from stages.engines.training.resume_point import TrainerCounts, read_random_state, write_random_state
from stages.engines.training.row_tensors import Row, make_row_tensors, row_length
from stages.engines.training.staged_directories import staged_directories
from stages.engines.training.start_logprobs import StartLogprobs
from stages.engines.training.step_sums import StepSums
from stages.engines.weight_files import validate_weights
from stages.errors import EngineError
from stages.rl.aggregation import Normaliser
from stages.spec.execution import OptimizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSettings(TrainerSettings):
    """What every rank needs to know; plain values, so that they can be sent to another process."""

    layout: MegatronLayout
    """Parallel degrees."""
    sequence_parallel: bool = False
    """Whether norms and what lies between the parallel layers run on a part of the sequence per tensor shard."""


class MegatronTrainer(PolicySteps):
    """Trains and scores a causal language model that is split over ranks."""

    def __init__(self, settings: MegatronSettings, place: RankPlace, store: Any = None) -> None:  # noqa: ANN401
        """Meet the other ranks and load this rank's part of the model.

        Raises:
            EngineError: The model is of another family or lacks tensors, or another engine lives in this process.
        """
        if parallel_state.model_parallel_is_initialized():
            raise EngineError(
                "this process holds a megatron engine already and megatron-core keeps one layout per process: close "
                "the other engine first, or use another process"
            )
        self.settings = settings
        self.config = read_model_config(Path(settings.model_dir))
        self.counts = TrainerCounts()
        torch.set_num_threads(settings.threads)
        device = torch.device("cpu") if settings.device == "cpu" else torch.device("cuda", place.local_rank)
        if settings.device == "cuda":
            # Rank r is the plan's r-th device; the engine sees the devices of its machine in the plan's order.
            torch.cuda.set_device(device)
        join_process_group(place, settings.device, dist.HashStore() if place.num_ranks == 1 else store)
        self._at = settings.layout.coordinates(place.rank)
        is_counted = self._at.stage == settings.layout.pp - 1 and self._at.shard == 0
        self._group = RankGroup(
            place.rank, place.num_ranks, device, is_counted=is_counted, first_ranks=place.first_ranks
        )
        self._dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
        self._optimizer: ShardedAdam | None = None
        with self._device():
            self.model = self._make_model()
        validate_weights(Path(settings.model_dir), self.expected_shapes(), self.tied_names())
        self._files = LayoutFiles(self.config, settings.layout, self._at, self._group, Path(settings.model_dir))
        self.load_weights(settings.model_dir)

    def _make_model(self) -> DistributedDataParallel:
        layout, settings = self.settings.layout, self.settings
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, order=RANK_ORDER,
            create_gloo_process_groups=False,
        )  # fmt: skip
        if settings.device == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)
        config = transformer_config(
            self.config, layout, dtype=self._dtype, is_recomputing=settings.is_recomputing,
            sequence_parallel=settings.sequence_parallel,
        )  # fmt: skip
        config.finalize_model_grads_func = _finish_gradients
        stage = PolicyStage(config, self.config, layout, self._at, settings.logits_chunk_tokens)
        wrapping = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        return DistributedDataParallel(config, wrapping, stage.to(self._group.device))

    @property
    def group(self) -> RankGroup:
        """All ranks; the first shard of each replica's last stage counts."""
        return self._group

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.config.vocab

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a model directory must hold."""
        return self.config.shapes

    def tied_names(self) -> set[str]:
        """Names under which a directory may hold a second copy of a tied weight."""
        return {"lm_head.weight"} if self.config.is_tied else set()

    @property
    def optimizer(self) -> ShardedAdam:
        """Made on first use, so that an engine that only scores has none."""
        if self._optimizer is None:
            replicas = parallel_state.get_data_parallel_group()
            self._optimizer = ShardedAdam(self.model, replicas, is_bf16=self._dtype == torch.bfloat16)
        return self._optimizer

    def load_weights(self, directory: str) -> None:
        """Replace the weights and forget optimizer and counts."""
        self._files.read_weights(Path(directory), self._parameters())
        self._optimizer, self.counts = None, TrainerCounts()
        self._group.barrier()

    def load_checkpoint(self, policy_dir: str, trainer_dir: str | None) -> None:
        """Replace weights and, from `trainer_dir`, optimizer, counts and random states; of any layout."""
        with self._device():
            self.load_weights(policy_dir)
            if trainer_dir is not None:
                self.counts = self._files.read_trainer(Path(trainer_dir), self._parameters(), self.optimizer)
                read_random_state(Path(trainer_dir), self._group.rank)
            self._group.barrier()

    def save(self, policy_dir: str, trainer_dir: str, policy_version: int) -> None:
        """Write serving weights and resume point; each directory appears at once, when it is complete."""
        serving = torch.float32 if self.settings.serving_dtype == "fp32" else torch.bfloat16
        with self._device(), staged_directories((Path(policy_dir), Path(trainer_dir)), self._group) as staged:
            policy, trainer = staged
            write_random_state(trainer, self._group.rank)
            self._files.write_weights(policy, self._parameters(), self.optimizer, serving)
            is_rounded = serving != torch.float32 or self._dtype != torch.float32
            self._files.write_trainer(
                trainer, self._parameters(), self.optimizer, self.counts, has_weights=is_rounded,
                policy_version=policy_version,
            )  # fmt: skip

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Log-probs of the completion tokens, [rows][completion tokens]."""
        with self._device():
            return super().score(rows)

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make every optimizer step of the request."""
        with self._device():
            return super().train(request)

    def close(self) -> None:
        """Leave the other ranks."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def my_rows(self, row_indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return the rows of this rank's replica, by the plan's shares."""
        return split_by_shares(row_indices, lengths, self.settings.layout.shares)[self._at.replica]

    def score_into(self, scores: StartLogprobs, rows: Sequence[Row], row_indices: Sequence[int]) -> None:
        """Compute the log-probs of some rows, each on one replica, and share them."""
        if not row_indices:
            return
        lengths = [row_length(row) for row in rows]
        prompts = [tuple(row.prompt_token_ids) for row in rows]
        mine = self.my_rows(row_indices, lengths)
        packs = pack_micro_batches(mine, lengths, self.settings.score_batch_tokens, prompts)

        def put(pack: list[int], logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            scores.put(pack, logprobs)
            return logprobs.new_zeros(())

        if packs:
            with torch.no_grad():
                run_pipeline(
                    self.model, packs,
                    lambda pack: make_row_tensors([rows[row] for row in pack], self._group.device),
                    put, has_backward=False,
                )  # fmt: skip
        scores.share(row_indices, self._group)

    def set_rate(self, spec: OptimizerSpec, learning_rate: float) -> None:
        """Set what the next update uses."""
        self.optimizer.set_hyperparameters(spec, learning_rate)

    def backward(
        self, micro_batches: Sequence[MicroBatch], request: TrainingRequest, normaliser: Normaliser,
        start: StartLogprobs,
    ) -> StepResult:  # fmt: skip
        """Make the clipped gradient of the whole step over stages, shards and replicas."""
        sums = StepSums()

        def loss_of(micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            return micro_batch_loss(micro, logprobs, entropy, request, normaliser, start, sums)

        self.model.zero_grad_buffer()
        run_pipeline(self.model, micro_batches, lambda micro: micro.tensors, loss_of, has_backward=True)
        norm = self.optimizer.clip(request.optimizer.max_grad_norm)
        return StepResult(
            sums=sums.over_ranks(self._group), grad_norm=self._group.max_floats([poisoned(norm)])[0]
        )  # fmt: skip

    def finish_step(self, *, is_applied: bool) -> None:
        """Update the weights, or leave them alone, and drop the gradient."""
        if is_applied:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.module.named_parameters())

    @contextmanager
    def _device(self) -> Iterator[None]:
        with megatron_on(self.settings.device):
            yield


def _finish_gradients(model: list[Any], _: torch.Tensor | None, **kwargs: Any) -> None:  # noqa: ANN401 - its groups
    """Add gradients up over replicas, shards and tied stages, and divide by nothing."""
    finalize_model_grads(model, None, **kwargs)
