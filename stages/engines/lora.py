"""LoRA adapters on a transformers model: made by the `peft` library, read and written in its format.

Adapters are computed beside the layers they stand on and never merged into them. A base in bf16 would swallow most of a
merge: an update smaller than half a unit in the last place of a weight rounds away. Unmerged, the base stays what was
loaded, byte for byte, so a new adapter is a few tensors copied and nothing has to be undone; and trainer and engines
compute the same function. Adapters are fp32 whatever the base is.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.engines.adapter_files import CONFIG_NAME, PREFIX, WEIGHTS_NAME, adapter_config
from stages.errors import EngineError
from stages.rl.matrix_products import use_products_in
from stages.spec.execution import LoraSpec

_ADAPTER: Final = "default"
"""Name of the only adapter of a model."""
_MADE_OF: Final = (".lora_A.", ".lora_B.")


def add_adapter(model: nn.Module, spec: LoraSpec) -> None:
    """Put adapters that do nothing yet on a model's layers; only they are trainable then.

    Args:
        model: A causal language model of transformers.
        spec: Rank, factor and layers.

    Raises:
        EngineError: The model has no linear layer of one of the names.
    """
    from peft import LoraConfig, inject_adapter_in_model  # heavy, and runs without adapters need no peft

    present = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    absent = [name for name in spec.target_modules if name not in present]
    if absent:
        raise EngineError(
            f"{type(model).__name__} has no linear layers called {', '.join(absent)}, on which "
            f"engines.training.lora.target_modules wants adapters; it has {', '.join(sorted(present))}",
            absent=absent,
        )
    config = LoraConfig(
        r=spec.rank, lora_alpha=adapter_config(spec)["lora_alpha"], target_modules=list(spec.target_modules),
        lora_dropout=0.0, bias="none",
    )  # fmt: skip
    inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    for name, parameter in model.named_parameters():
        is_adapter = _is_adapter(name)
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()
    switch_adapter_off(model)
    use_products_in(model)


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's own tensors by the names that they have without adapters; a tied one is one object."""
    state = model.state_dict(keep_vars=True).items()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state if not _is_adapter(name)}


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the adapters by their names in peft's files."""
    state = model.state_dict().items()
    return {f"{PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}": tensor for name, tensor in state if _is_adapter(name)}


def switch_adapter_off(model: nn.Module) -> None:
    """Let the model compute what its own weights say, until an adapter is read."""
    _zero(adapter_state(model))


def start_adapter(model: nn.Module, seed: int) -> None:
    """Give adapters the values from which training starts: B is 0, A is uniform in +-1/sqrt(inputs), as peft has it.

    The numbers depend on the seed and on each tensor's name only, not on ranks, devices or what was drawn before.
    """
    state = adapter_state(model)
    _zero(state)
    with torch.no_grad():
        for name, tensor in state.items():
            if ".lora_A." in name:
                digest = hashlib.sha256(f"lora {seed} {name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                bound = tensor.shape[1] ** -0.5
                tensor.copy_((torch.rand(tensor.shape, generator=generator) * 2.0 - 1.0) * bound)


def read_adapter_into(model: nn.Module, directory: Path) -> None:
    """Replace the adapters' values in place; the caller has validated the directory."""
    state = adapter_state(model)
    with torch.no_grad(), safe_open(directory / WEIGHTS_NAME, framework="pt") as opened:
        for name, tensor in state.items():
            tensor.copy_(opened.get_tensor(name))


def write_adapter(model: nn.Module, spec: LoraSpec, directory: Path) -> None:
    """Write the adapters in peft's format; the same values give the same bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter_state(model).items()}
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    config = adapter_config(spec)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_adapter(name: str) -> bool:
    return any(part in name for part in _MADE_OF)


def _zero(state: dict[str, Tensor]) -> None:
    """Set B to 0: then A times B adds nothing, whatever A is."""
    with torch.no_grad():
        for name, tensor in state.items():
            if ".lora_B." in name:
                tensor.zero_()
