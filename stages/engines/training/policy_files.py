"""Weights between a module and directories in Hugging Face format; safetensors only, never pickle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stages.engines.lora import base_state
from stages.engines.training.rank_group import RankGroup
from stages.engines.training.weight_sharding import copy_whole, whole_on_cpu
from stages.engines.weight_files import weight_files
from stages.errors import EngineError

_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt", "*.pth")


def expected_shapes(model: Any) -> dict[str, tuple[int, ...]]:  # noqa: ANN401 - transformers has no useful type
    """Shapes of the weights that a directory must hold, tied ones once."""
    return {name: tuple(tensor.shape) for name, tensor in _own_tensors(model).items()}


def tied_names(model: Any) -> set[str]:  # noqa: ANN401 - see above
    """Names under which a directory may hold a second copy of a tied weight."""
    return set(base_state(model)) - set(_own_tensors(model))


def read_weights_into(model: Any, directory: Path) -> None:  # noqa: ANN401 - see above
    """Replace every weight in place; the caller has validated names and shapes of the directory."""
    own = _own_tensors(model)
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open isn't a mapping
                if name in own:
                    copy_whole(own[name], opened.get_tensor(name))


def _own_tensors(model: Any) -> dict[str, Tensor]:  # noqa: ANN401 - see above
    """Weights by name, tied ones once (under the first name), adapters left out."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in base_state(model).items():
        # A tied weight is one parameter under two names.
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def copy_source_files(source_dir: Path, out_dir: Path) -> None:
    """Copy what a model directory holds beside config and weights: tokenizer, templates ..."""
    model_files = {path for pattern in _MODEL_FILES for path in source_dir.glob(pattern)}
    for path in sorted(source_dir.iterdir()):
        if path.is_file() and path not in model_files:
            shutil.copyfile(path, out_dir / path.name)


def write_serving_directory(
    model: Any, source_dir: Path, out_dir: Path, dtype: torch.dtype, ranks: RankGroup  # noqa: ANN401 - see above
) -> None:  # fmt: skip
    """Write config, weights (tied ones once) and tokenizer into a fresh directory; rank 0 writes, all call it together.

    Args:
        model: transformers model.
        source_dir: Directory the model came from; its tokenizer and other files are copied byte by byte.
        out_dir: Must exist and be empty.
        dtype: Type of the written weights.
        ranks: The ranks that hold the model.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise EngineError(f"serving weights are fp32 or bf16, not {dtype}")
    state = whole_on_cpu(_own_tensors(model), ranks, dtype)
    if ranks.rank > 0:
        return
    copy_source_files(source_dir, out_dir)
    model.save_pretrained(out_dir, state_dict=state, max_shard_size="4GB")
    config_path = out_dir / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
