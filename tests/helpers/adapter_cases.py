"""LoRA adapters with random values for tests, and the whole model that base and adapter amount to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stages.engines.adapter_files import CONFIG_NAME, PREFIX, WEIGHTS_NAME, adapter_config, adapter_shapes
from stages.engines.protocol import AdapterBase
from stages.engines.weight_files import read_shapes, weight_files
from stages.spec.execution import LoraSpec
from storage.weights_hash import weights_hash

LORA = LoraSpec(rank=4, alpha=8.0)


def save_adapter(directory: Path, base_dir: Path, *, seed: int, spec: LoraSpec = LORA, scale: float = 0.3) -> Path:
    """Write an adapter whose values are large enough for errors to show; return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(read_shapes(base_dir), spec)
    tensors = {name: torch.randn(shape, generator=generator) * scale for name, shape in sorted(shapes.items())}
    save_file(tensors, directory / WEIGHTS_NAME)
    (directory / CONFIG_NAME).write_text(json.dumps(adapter_config(spec)))
    return directory


def save_merged(directory: Path, base_dir: Path, adapter_dir: Path, spec: LoraSpec = LORA) -> Path:
    """Write W + alpha / r * B A as a whole model in plain torch; return `directory`."""
    shutil.copytree(base_dir, directory)
    adapter = load_file(adapter_dir / WEIGHTS_NAME)
    for path in weight_files(directory):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            layer = f"{PREFIX}{name.removesuffix('.weight')}"
            if (down := adapter.get(f"{layer}.lora_A.weight")) is not None:
                tensors[name] = tensor + (spec.alpha / spec.rank) * adapter[f"{layer}.lora_B.weight"] @ down
        save_file(tensors, path, metadata={"format": "pt"})
    return directory


def base_at(directory: Path) -> AdapterBase:
    """Return a model directory as the base of adapters."""
    return AdapterBase(directory=directory, weights_hash=hash_at(directory))


def hash_at(directory: Path) -> str:
    """Return the hash of a model directory's weights."""
    return weights_hash({path.name: path for path in weight_files(directory)})
