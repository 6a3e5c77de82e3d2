"""What every type of source is asked for. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plans.spec.llm import LlmShape

if TYPE_CHECKING:
    from stages.models.warm_up import WarmUpProgress, WarmUpRow


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpRows:
    """Rows of a supervised warm-up."""

    train: Sequence[WarmUpRow]
    held_out: Sequence[WarmUpRow]


def _report_nothing(progress: WarmUpProgress) -> None:
    del progress


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterialiseRequest:
    """What a source may need beside its own fields."""

    shape: LlmShape
    """Shape of the job's actor; the model must have it."""
    seed: int = 0
    """Seed of random weights and of the warm-up."""
    warm_up_rows: Callable[[Any], WarmUpRows] | None = None
    """Makes the rows of a warm-up, given the tokenizer."""
    report: Callable[[WarmUpProgress], None] = _report_nothing
    """Called after each measurement of a warm-up."""
