"""Trainers by what they train; each is imported where it runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, cast

if TYPE_CHECKING:
    from stages.engines.training.rank_model import RankModel

TrainerKind = Literal["policy", "critic"]
"""What a training engine's model is for."""

_CLASSES: Final[Mapping[TrainerKind, str]] = {
    "policy": "stages.engines.training.rank_trainer:RankTrainer",
    "critic": "stages.engines.training.critic_trainer:CriticTrainer",
}


def trainer_class(kind: TrainerKind) -> type[RankModel]:
    """Return the class that every rank makes."""
    module_name, _, name = _CLASSES[kind].partition(":")
    return cast("type[RankModel]", getattr(importlib.import_module(module_name), name))
