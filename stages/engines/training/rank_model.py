"""What every rank of a training engine does, whatever its model is for: weights, optimizer, resume point.

All ranks call the same method with the same arguments at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from stages.engines.training.batching import pack_micro_batches, split_over_ranks
from stages.engines.training.parameter_groups import make_adamw
from stages.engines.training.policy_files import (
    expected_shapes,
    read_weights_into,
    tied_names,
    write_serving_directory,
)
from stages.engines.training.rank_place import RankPlace
from stages.engines.training.ranks import Ranks
from stages.engines.training.resume_point import (
    TrainerCounts,
    read_random_state,
    read_trainer_files,
    write_random_state,
    write_trainer_files,
)
from stages.engines.training.row_tensors import Row, RowTensors, make_row_tensors, row_length
from stages.engines.training.staged_directories import staged_directories
from stages.engines.training.start_logprobs import StartLogprobs
from stages.engines.training.weight_sharding import shard_weights
from stages.spec.execution import LoraSpec

Precision = Literal["fp32", "bf16-mixed", "bf16"]
_Pass = TypeVar("_Pass")
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
    is_sharded: bool = False
    """Whether weights, gradients and moments are spread over data-parallel ranks (FSDP2) instead of whole on each."""
    lora: LoraSpec | None = None
    """Adapters that are trained in place of the weights."""


def serving_dtype_of(settings: TrainerSettings) -> torch.dtype:
    """Return the type in which the settings have weights saved."""
    return _DTYPES[settings.serving_dtype]


class RankModel(ABC):
    """One rank's copy of the weights and of the optimizer; the base of the trainers."""

    def __init__(self, settings: TrainerSettings, place: RankPlace, store: Any = None) -> None:  # noqa: ANN401
        """Load the model and meet the other ranks."""
        self.settings = settings
        mixed = "bf16" if settings.precision == "bf16-mixed" else "no"
        self.ranks = Ranks(place, device=settings.device, mixed_precision=mixed, store=store)
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed * 1_000_003 + place.rank)
        self.is_sharded = settings.is_sharded and place.num_ranks > 1
        # What is spread needs no device that could hold the whole.
        loading = torch.device("cpu") if self.is_sharded else self.ranks.device
        module = self.load_module(_DTYPES.get(settings.precision, torch.float32), loading)
        self.model: Any = module.model
        # accelerate wraps in DDP; FSDP2, which it does not offer on CPU, goes beneath its autocast.
        self.module: Any = self.ranks.accelerator.prepare_model(
            module, device_placement=not self.is_sharded, evaluation_mode=self.is_sharded
        )
        if self.is_sharded:
            shard_weights(self.module, self.model, self.ranks)
        self._optimizer: torch.optim.Optimizer | None = None
        self.counts = TrainerCounts()

    @abstractmethod
    def load_module(self, dtype: torch.dtype, device: torch.device) -> Any:  # noqa: ANN401 - its `model` is transformers'
        """Return the module that the ranks wrap.

        Args:
            dtype: Type of the weights in memory.
            device: Where they go.
        """

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below it."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a model directory must hold, tied ones once."""
        return expected_shapes(self.model)

    def tied_names(self) -> set[str]:
        """Names under which a directory may hold a second copy of a tied weight."""
        return tied_names(self.model)

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

    def save(self, policy_dir: str, trainer_dir: str, policy_version: int) -> None:
        """Write serving weights and resume point; each directory appears at once, when it is complete."""
        serving = serving_dtype_of(self.settings)
        is_rounded = serving != self.model.dtype
        final = (Path(policy_dir), Path(trainer_dir))
        with staged_directories(final, self.ranks) as (policy, trainer):
            write_random_state(trainer, self.ranks.place.rank)
            write_serving_directory(self.model, Path(self.settings.model_dir), policy, serving, self.ranks)
            write_trainer_files(
                trainer, self.model, self.optimizer, self.counts, has_weights=is_rounded, ranks=self.ranks,
                policy_version=policy_version,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the other ranks."""
        self.ranks.close()

    @abstractmethod
    def numbers_of(self, bare: nn.Module, tensors: RowTensors) -> torch.Tensor:
        """Return one number per completion token of a batch, [N], without gradient; runs under autocast."""

    def score_into(self, scores: StartLogprobs, rows: Sequence[Row], row_indices: Sequence[int]) -> None:
        """Compute the numbers of some rows, each on one rank, and share them."""
        if not row_indices:
            return
        lengths = [row_length(row) for row in rows]
        mine = split_over_ranks(row_indices, lengths, self.ranks.place.num_ranks)[self.ranks.place.rank]
        prompts = [tuple(row.prompt_token_ids) for row in rows]
        packs = pack_micro_batches(mine, lengths, self.settings.score_batch_tokens, prompts)
        shortest = min(row_indices, key=lambda row: (lengths[row], row))
        for pack, is_counted in self.as_many_as_others([(pack, True) for pack in packs], ([shortest], False)):
            tensors = make_row_tensors([rows[row] for row in pack], self.ranks.device)
            # The wrapped module would count a forward pass without a backward one; autocast is set here instead.
            with torch.no_grad(), self.ranks.accelerator.autocast():
                flat = self.numbers_of(self._bare_module(), tensors)
            if is_counted:
                scores.put(pack, flat)
        if self.is_sharded:
            # No backward pass follows, at whose end the outermost tensors would be spread again.
            self.module.reshard()
        scores.share(row_indices, self.ranks)

    def as_many_as_others(self, passes: list[_Pass], idle: _Pass) -> list[_Pass]:
        """Return this rank's forward passes, with idle ones where weights are spread and other ranks make more."""
        if not self.is_sharded:
            return passes
        most = int(self.ranks.max_floats([float(len(passes))])[0])
        return [*passes, *[idle] * (most - len(passes))]

    def _bare_module(self) -> Any:  # noqa: ANN401 - what `load_module` made
        return self.ranks.accelerator.unwrap_model(self.module, keep_fp32_wrapper=True)
