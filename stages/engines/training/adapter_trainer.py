"""The policy's trainer where adapters are trained and the weights below them stay as they are; runs on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.engines.adapter_files import BASE_VERSION
from stages.engines.lora import add_adapter, base_state, read_adapter_into, start_adapter, write_adapter
from stages.engines.protocol import AdapterBase
from stages.engines.training.policy_files import read_weights_into, write_serving_directory
from stages.engines.training.policy_module import PolicyModule
from stages.engines.training.rank_model import serving_dtype_of
from stages.engines.training.rank_trainer import RankTrainer
from stages.engines.training.resume_point import (
    TrainerCounts,
    read_random_state,
    read_trainer_files,
    write_random_state,
    write_trainer_files,
)
from stages.engines.training.staged_directories import staged_directories
from stages.errors import EngineError
from stages.spec.execution import LoraSpec


class AdapterTrainer(RankTrainer):
    """Trains adapters; gradients, moments and resume points are theirs alone."""

    _base_hash: str | None = None

    @property
    def _spec(self) -> LoraSpec:
        if self.settings.lora is None:
            raise EngineError("a trainer of adapters was started without a description of them; start it with one")
        return self.settings.lora

    def load_module(self, dtype: torch.dtype, device: torch.device) -> PolicyModule:
        """Return the policy module with adapters on its layers."""
        module = super().load_module(dtype, device)
        add_adapter(module.model, self._spec)
        return module

    def load_checkpoint(self, policy_dir: str, trainer_dir: str | None) -> None:
        """Take a base, with adapters as training starts from them or as a resume point of version 0 has them."""
        self._load_base(policy_dir)
        self._base_hash = None
        start_adapter(self.model, self.settings.seed)
        self._resume(trainer_dir)

    def load_adapter_checkpoint(self, base: AdapterBase, policy_dir: str, trainer_dir: str | None) -> None:
        """Take an adapter on a base, and optimizer, counts and random states of its resume point."""
        if self._base_hash != base.weights_hash:
            self._load_base(str(base.directory))
            self._base_hash = base.weights_hash
        read_adapter_into(self.model, Path(policy_dir))
        self._resume(trainer_dir)

    def save(self, policy_dir: str, trainer_dir: str, policy_version: int) -> None:
        """Write the base (version 0) or the adapters (later ones), and a resume point of the adapters."""
        final = (Path(policy_dir), Path(trainer_dir))
        with staged_directories(final, self.ranks) as (policy, trainer):
            write_random_state(trainer, self.ranks.place.rank)
            if policy_version == BASE_VERSION:
                source = Path(self.settings.model_dir)
                write_serving_directory(self.model, source, policy, serving_dtype_of(self.settings), self.ranks)
            elif self.ranks.rank == 0:
                write_adapter(self.model, self._spec, policy)
            write_trainer_files(
                trainer, self.model, self.optimizer, self.counts, has_weights=True, ranks=self.ranks,
                policy_version=policy_version,
            )  # fmt: skip

    def _load_base(self, directory: str) -> None:
        read_weights_into(self.model, Path(directory))
        serving = serving_dtype_of(self.settings)
        with torch.no_grad():
            for tensor in base_state(self.model).values():
                # What engines hold: the base is never written again, so it has no more precise form.
                tensor.copy_(tensor.to(serving))

    def _resume(self, trainer_dir: str | None) -> None:
        self._optimizer, self.counts = None, TrainerCounts()
        if trainer_dir is not None:
            optimizer: Any = self.optimizer
            self.counts = read_trainer_files(Path(trainer_dir), self.model, optimizer)
            read_random_state(Path(trainer_dir), self.ranks.place.rank)
        self.ranks.barrier()
