"""Options of training engines (`engines.training.options` of a job) and the settings of their ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import Field, ValidationError

from stages.engines.launch import EngineLaunch
from stages.engines.training.rank_model import Precision, TrainerSettings
from stages.errors import EngineUnavailableError, SpecFaultsError
from stages.spec.section import Section


class TrainerOptions(Section):
    """What the options of a launch may hold, whatever the engine."""

    precision: Precision | None = None
    """`training.precision` of the job; absent = fp32 with launch dtype fp32, else bf16-mixed."""
    recompute: Literal["full", "none"] = "none"
    """`training.recompute` of the job: whether activations are recomputed in the backward pass."""
    seed: int = Field(default=0, ge=0)
    """Seed of the engine's random numbers."""
    serving_dtype: Literal["fp32", "bf16"] | None = None
    """Type of the saved policy weights; absent = fp32 with precision fp32, else bf16."""
    logits_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once."""
    score_batch_tokens: int = Field(default=16384, ge=1)
    """Padded tokens per forward pass without gradients."""
    rank_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait of one rank for another."""


class AccelerateOptions(TrainerOptions):
    """What the options of the accelerate engine's launch may hold."""

    num_processes: int | None = Field(default=None, ge=1)
    """Data-parallel ranks, of all machines; absent = one per GPU, 1 without GPUs."""
    sharding: Literal["none", "full"] = "none"
    """`none`: whole weights, gradients and moments on every rank (DDP); `full`: spread over the ranks (FSDP2)."""


_Options = TypeVar("_Options", bound=TrainerOptions)


def parse_options(launch: EngineLaunch, kind: type[_Options]) -> _Options:
    """Options of a launch, every fault reported.

    Args:
        launch: The launch.
        kind: Class of the engine's options.

    Raises:
        SpecFaultsError: An option is unknown or wrong.
    """
    try:
        return kind.model_validate(launch.options)
    except ValidationError as error:
        faults = [f"engines.training.options.{_place(fault['loc'])}: {fault['msg']}" for fault in error.errors()]
        raise SpecFaultsError(f"the launch of the {launch.name} engine", faults) from None


def num_ranks_of(launch: EngineLaunch, options: AccelerateOptions) -> int:
    """Number of ranks.

    Raises:
        SpecFaultsError: More ranks than GPUs.
    """
    wanted = options.num_processes or max(len(launch.gpus), 1)
    here = wanted if launch.gang is None else len(launch.gang.ranks_of(launch.machine))
    if launch.gpus and here > len(launch.gpus):
        raise SpecFaultsError(
            "the launch of the accelerate engine",
            [f"engines.training.options.num_processes is {here}, but the engine has {len(launch.gpus)} GPU(s)"],
        )
    return wanted


def accelerate_settings(launch: EngineLaunch, options: AccelerateOptions, model_dir: Path) -> TrainerSettings:
    """Settings of every rank of the accelerate engine.

    Raises:
        SpecFaultsError: Adapters are to be spread over ranks.
        EngineUnavailableError: See `settings_of`.
    """
    if options.sharding == "full" and launch.lora is not None:
        raise SpecFaultsError(
            "the launch of the accelerate engine",
            ["engines.training.options.sharding is full beside engines.training.lora: adapters are small, and their "
             "base is whole on every rank; use sharding none"],
        )  # fmt: skip
    return replace(settings_of(launch, options, model_dir), is_sharded=options.sharding == "full")


def settings_of(launch: EngineLaunch, options: TrainerOptions, model_dir: Path) -> TrainerSettings:
    """Settings of every rank.

    Raises:
        EngineUnavailableError: The launch names GPUs and torch sees none.
    """
    if launch.gpus and not torch.cuda.is_available():
        raise EngineUnavailableError(
            f"the engine is placed on {', '.join(launch.gpus)}, but torch {torch.__version__} sees no CUDA device: "
            "install a CUDA build of torch, or place training on CPU"
        )
    precision = options.precision or ("fp32" if launch.dtype == "fp32" else "bf16-mixed")
    return TrainerSettings(
        model_dir=str(model_dir),
        precision=precision,
        serving_dtype=options.serving_dtype or ("fp32" if precision == "fp32" else "bf16"),
        is_recomputing=options.recompute == "full",
        device="cuda" if launch.gpus else "cpu",
        threads=launch.threads,
        seed=options.seed,
        logits_chunk_tokens=options.logits_chunk_tokens,
        score_batch_tokens=options.score_batch_tokens,
        lora=launch.lora,
    )


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
