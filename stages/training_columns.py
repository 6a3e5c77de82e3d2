"""The column family `training`: what training made of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stages.engines.protocol import TrainingOutcome
from stages.rl.correction_spec import CorrectionSpec
from stages.training_rows import PreparedRows


def training_columns(
    prepared: PreparedRows, outcome: TrainingOutcome | None, correction: CorrectionSpec, version: int
) -> dict[str, dict[str, Any]]:
    """Return the columns of every row, by row id.

    Args:
        prepared: Rows and decisions.
        outcome: What the engine measured on the kept rows; None when no optimizer step was made.
        correction: The correction in force.
        version: Policy version that training started from.
    """
    measured: dict[int, Sequence[float]] = {}
    if outcome is not None:
        measured = dict(zip(prepared.kept, outcome.trainer_logprobs, strict=True))
    return {
        row["row_id"]: {
            "row_id": row["row_id"],
            "advantage": prepared.advantage(place),
            "is_dropped": prepared.reasons[place] is not None,
            "dropped_reason": prepared.reasons[place],
            "staleness": prepared.staleness[place],
            "trained_policy_version": version,
            **_measurements(row, measured.get(place), correction),
        }
        for place, row in enumerate(prepared.rows)
    }


def _measurements(
    row: Mapping[str, Any], trainer: Sequence[float] | None, correction: CorrectionSpec
) -> dict[str, float | int | None]:
    names = (
        "importance_weight_mean", "importance_weight_max", "num_truncated_weights", "trainer_logprob_mean",
        "trainer_logprob_min", "logprob_gap_max",
    )  # fmt: skip
    if trainer is None or not len(trainer):
        return dict.fromkeys(names)
    ours = np.asarray(trainer, dtype=np.float64)
    gap = ours - np.asarray(row["sampler_logprobs"], dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(gap)
    values = (
        float(weights.mean()), float(weights.max()), int((weights > correction.cap).sum()), float(ours.mean()),
        float(ours.min()), float(np.abs(gap).max()),
    )  # fmt: skip
    return {
        name: value if math.isfinite(value) else None  # a skipped step may leave numbers that are none
        for name, value in zip(names, values, strict=True)
    }
