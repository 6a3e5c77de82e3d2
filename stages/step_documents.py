"""Optimizer steps as JSON, the same for every trainer."""

from __future__ import annotations

from math import isfinite

from pydantic import JsonValue

from stages.engines.protocol import OptimizerStepMetrics


def step_document(step: OptimizerStepMetrics) -> dict[str, JsonValue]:
    """Return what a manifest keeps of an optimizer step; numbers that are not finite become null."""
    values: dict[str, JsonValue] = {
        name: value if isfinite(value) else None for name, value in sorted(step.values.items())
    }
    return {
        "optimizer_step": step.optimizer_step,
        "is_skipped": float(step.is_skipped),
        "num_rows": step.num_rows,
        "num_tokens": step.num_tokens,
        **values,
    }
