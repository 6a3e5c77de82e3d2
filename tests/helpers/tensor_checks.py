"""What model directories and resume points hold, and whether two of them hold the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stages.engines.weight_files import weight_files


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory."""
    return {name: value for path in weight_files(directory) for name, value in load_file(path).items()}


def assert_equal_tensors(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], *, absolute: float, relative: float = 0.0
) -> None:
    """Same names, and values within a tolerance."""
    assert sorted(left) == sorted(right)
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=relative, atol=absolute, msg=lambda text, name=name: f"{name}: {text}"
        )


def metrics_of(outcome: Any, names: Sequence[str]) -> list[list[float]]:
    """Metrics of every optimizer step."""
    return [[step.values[name] for name in names] for step in outcome.steps]


def optimizer_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the optimizer in a resume point."""
    paths = sorted(directory.glob("optimizer*.safetensors"))
    return {name: value for path in paths for name, value in load_file(path).items()}
