"""Weights between a module and directories in Hugging Face format; safetensors only, never pickle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stages.errors import ContractError, EngineError

_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt", "*.pth")


def read_weights_into(model: Any, directory: Path) -> None:  # noqa: ANN401 - transformers has no useful type
    """Replace every weight in place; names and shapes are compared before the first one is touched.

    Raises:
        ContractError: The directory has no safetensors, or not the weights of this model.
    """
    expected = _own_tensors(model)
    files = sorted(directory.glob("*.safetensors"))
    faults = [] if files else [f"{directory} has no *.safetensors file"]
    places: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open isn't a mapping
                places[name] = path
                shape = tuple(opened.get_slice(name).get_shape())
                if name in expected and tuple(expected[name].shape) != shape:
                    faults.append(f"{name} has shape {shape} instead of {tuple(expected[name].shape)}")
    if files:
        tied = _tied_names(model)
        faults += [f"{name} is missing" for name in sorted(set(expected) - set(places))]
        faults += [f"{name} is unknown" for name in sorted(set(places) - set(expected) - tied)]
    if faults:
        listing = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise ContractError(
            f"{directory} doesn't hold the weights of this {type(model).__name__}: {listing}; give the directory of a "
            "policy version of the same model",
            directory=str(directory),
            faults=faults[:20],
        )
    _copy_in(expected, files)


@torch.no_grad()
def _copy_in(expected: Mapping[str, Tensor], files: list[Path]) -> None:
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open isn't a mapping
                if name in expected:
                    expected[name].copy_(opened.get_tensor(name))


def _own_tensors(model: Any) -> dict[str, Tensor]:  # noqa: ANN401 - see above
    """Weights by name, tied ones once (under the first name)."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


def _tied_names(model: Any) -> set[str]:  # noqa: ANN401 - see above
    return set(model.state_dict()) - set(_own_tensors(model))


def write_serving_directory(model: Any, source_dir: Path, out_dir: Path, dtype: torch.dtype) -> None:  # noqa: ANN401
    """Write config, weights (tied ones once) and tokenizer into a fresh directory.

    Args:
        model: transformers model.
        source_dir: Directory the model came from; its tokenizer and other files are copied byte by byte.
        out_dir: Must exist and be empty.
        dtype: Type of the written weights.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise EngineError(f"serving weights are fp32 or bf16, not {dtype}")
    model_files = {path for pattern in _MODEL_FILES for path in source_dir.glob(pattern)}
    for path in sorted(source_dir.iterdir()):
        if path.is_file() and path not in model_files:
            shutil.copyfile(path, out_dir / path.name)
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in _own_tensors(model).items()}
    model.save_pretrained(out_dir, state_dict=state, max_shard_size="4GB")
    config_path = out_dir / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
