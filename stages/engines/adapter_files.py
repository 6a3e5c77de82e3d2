"""Directories of LoRA adapters in peft's format, checked before an engine lets them near its weights; without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stages.engines.architecture import unfit_directory
from stages.engines.weight_files import Shapes, validate_weights
from stages.spec.execution import LoraSpec

WEIGHTS_NAME: Final = "adapter_model.safetensors"
CONFIG_NAME: Final = "adapter_config.json"
BASE_VERSION: Final = 0
"""Policy version whose whole weights are below every adapter of a run."""
PREFIX: Final = "base_model.model."
"""What peft puts before the names of a model's layers in its files."""


def adapter_shapes(base: Shapes, spec: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors of an adapter: of each adapted weight [out, in], A [rank, in] and B [out, rank].

    Args:
        base: Shapes of the model's own tensors by name.
        spec: The adapter.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in base.items():
        layer = name.removesuffix(".weight")
        if layer != name and layer.rpartition(".")[2] in spec.target_modules:
            shapes[f"{PREFIX}{layer}.lora_A.weight"] = (spec.rank, shape[1])
            shapes[f"{PREFIX}{layer}.lora_B.weight"] = (shape[0], spec.rank)
    return shapes


def adapter_config(spec: LoraSpec) -> dict[str, Any]:
    """Return the document `adapter_config.json` of an adapter."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
        "r": spec.rank, "lora_alpha": _whole(spec.alpha), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "target_modules": sorted(spec.target_modules),
    }  # fmt: skip


def validate_adapter(directory: Path, spec: LoraSpec, base: Shapes) -> None:
    """Raise `EngineError`, with all faults, unless a directory holds just such an adapter.

    Args:
        directory: Adapter's directory.
        spec: What the engine was started for.
        base: Shapes of the model's own tensors by name.
    """
    found = read_adapter_config(directory)
    wanted = adapter_config(spec)
    faults = [
        f"{name} is {found.get(name)!r} instead of {wanted[name]!r}"
        for name in ("peft_type", "r", "lora_alpha", "bias")
        if found.get(name) != wanted[name]
    ]
    targets = found.get("target_modules")
    if not isinstance(targets, list) or sorted(map(str, targets)) != wanted["target_modules"]:
        faults.append(f"target_modules are {targets!r} instead of {wanted['target_modules']!r}")
    if faults:
        raise unfit_directory(directory, f"{CONFIG_NAME}: {'; '.join(faults)}")
    validate_weights(directory, adapter_shapes(base, spec))


def read_adapter_config(directory: Path) -> Mapping[str, Any]:
    """Return an adapter's configuration; `EngineError` if there is none that can be read."""
    path = directory / CONFIG_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unfit_directory(directory, f"{CONFIG_NAME} can't be read: {error}") from error
    if not isinstance(document, dict):
        raise unfit_directory(directory, f"{CONFIG_NAME} is no JSON object")
    return document


def _whole(alpha: float) -> float | int:
    """Return alpha as peft's files usually have it: a whole number where it is one."""
    return int(alpha) if alpha == int(alpha) else alpha
