"""Trainers by what they train; each is imported where it runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

if TYPE_CHECKING:
    from stages.engines.training.rank_model import TrainerSettings
    from stages.engines.training.rank_place import RankPlace

TrainerKind = Literal["policy", "adapter", "critic", "split_policy"]
"""What a training engine's model is for; of a policy with an adapter only that is trained; a split policy lies in parts
on the ranks (megatron-core)."""

_CLASSES: Final[Mapping[TrainerKind, str]] = {
    "policy": "stages.engines.training.rank_trainer:RankTrainer",
    "adapter": "stages.engines.training.adapter_trainer:AdapterTrainer",
    "critic": "stages.engines.training.critic_trainer:CriticTrainer",
    "split_policy": "stages.engines.megatron.trainer:MegatronTrainer",
}


class Trainer(Protocol):
    """One rank of a training engine; each call is made on all ranks together. What it trains adds methods."""

    vocab_size: int
    """Token ids are below it."""

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a model directory must hold, tied ones once."""
        ...

    def tied_names(self) -> set[str]:
        """Names under which a directory may hold a second copy of a tied weight."""
        ...

    def load_checkpoint(self, policy_dir: str, trainer_dir: str | None) -> None:
        """Replace weights and, from `trainer_dir`, optimizer, counts and random states."""
        ...

    def save(self, policy_dir: str, trainer_dir: str, policy_version: int) -> None:
        """Write serving weights and resume point; each directory appears at once, when it is complete."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...


class TrainerClass(Protocol):
    """Makes a trainer on one rank."""

    def __call__(self, settings: TrainerSettings, place: RankPlace, store: Any = None) -> Trainer:  # noqa: ANN401
        """Load the model and meet the other ranks."""
        ...


def trainer_class(kind: TrainerKind) -> TrainerClass:
    """Return the class that every rank makes."""
    module_name, _, name = _CLASSES[kind].partition(":")
    return cast("TrainerClass", getattr(importlib.import_module(module_name), name))
