"""Options of the accelerate engine (`engines.training.options` of a job) and the settings of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, ValidationError

from stages.engines.training.rank_trainer import Precision, TrainerSettings
from stages.errors import SpecFaults
from stages.spec.section import Section


class AccelerateOptions(Section):
    """What `engines.training.options` may hold."""

    serving_dtype: Literal["fp32", "bf16"] | None = None
    """Type of the saved policy weights; absent = fp32 with precision fp32, else bf16."""
    logits_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once."""
    score_batch_tokens: int = Field(default=16384, ge=1)
    """Padded tokens per forward pass without gradients."""
    rank_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait of one rank for another."""


def settings_from(
    model_dir: Path,
    precision: Precision,
    recompute: Literal["full", "none"],
    device: Literal["cpu", "cuda"],
    threads: int,
    seed: int,
    options: dict[str, JsonValue],
) -> tuple[TrainerSettings, float]:
    """Settings of every rank, and the ranks' timeout in seconds.

    Raises:
        SpecFaults: An option is unknown or wrong, or the directory isn't there.
    """
    try:
        parsed = AccelerateOptions.model_validate(options)
    except ValidationError as error:
        faults = [f"engines.training.options.{_place(fault['loc'])}: {fault['msg']}" for fault in error.errors()]
        raise SpecFaults("the job", faults) from None
    if not (model_dir / "config.json").is_file():
        raise SpecFaults("the training engine's model_dir", [f"{model_dir} has no config.json: give a model directory"])
    settings = TrainerSettings(
        model_dir=str(model_dir),
        precision=precision,
        serving_dtype=parsed.serving_dtype or ("fp32" if precision == "fp32" else "bf16"),
        is_recomputing=recompute == "full",
        device=device,
        threads=threads,
        seed=seed,
        logits_chunk_tokens=parsed.logits_chunk_tokens,
        score_batch_tokens=parsed.score_batch_tokens,
    )
    return settings, parsed.rank_timeout_s


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
