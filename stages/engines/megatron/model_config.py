"""A Hugging Face config as megatron-core wants it, for the families whose layers both compute alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stages.engines.training.resume_point import config_hash
from stages.errors import EngineError

FAMILIES: Final = ("llama", "qwen3")
"""Values of `model_type` that the engine takes."""
_FIXED_ROPES: Final = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies don't depend on the length of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a causal language model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    """Whether the head is the embedding."""
    has_head_norms: bool
    """Whether queries and keys are normed head by head."""
    norm_eps: float
    inverse_frequencies: torch.Tensor
    """Of the rotary embedding, [head_dim / 2], fp32."""
    hash: str
    """`config_hash` of the transformers model, which resume points carry."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of every tensor that a model directory holds, tied ones once."""


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read `config.json`.

    Raises:
        EngineError: Another family, or something of it that the engine doesn't compute; lists every fault.
    """
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    faults = _faults(config)
    if faults:
        raise EngineError(
            f"{model_dir} can't be trained by the megatron engine: {'; '.join(faults)}; use engine accelerate for it",
            faults=faults,
        )
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelConfig(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        is_tied=config.tie_word_embeddings,
        has_head_norms=config.model_type == "qwen3",
        norm_eps=config.rms_norm_eps,
        inverse_frequencies=_inverse_frequencies(config, head_dim),
        hash=config_hash(outline),
        shapes={name: tuple(parameter.shape) for name, parameter in outline.named_parameters()},
    )


def _faults(config: Any) -> list[str]:  # noqa: ANN401 - a configuration class
    if config.model_type not in FAMILIES:
        return [f"its family is {config.model_type}, the engine takes {' and '.join(FAMILIES)}"]
    faults = [
        f"{name} is true" for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)
    ]  # fmt: skip
    if config.hidden_act != "silu":
        faults.append(f"hidden_act is {config.hidden_act} instead of silu")
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        faults.append("some layers have windowed attention")
    rope = _rope_type(config)
    if rope not in _FIXED_ROPES:
        faults.append(f"rope_type is {rope}, the engine takes {', '.join(_FIXED_ROPES)}")
    return faults


def _rope_type(config: Any) -> str:  # noqa: ANN401 - a configuration class
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def _inverse_frequencies(config: Any, head_dim: int) -> torch.Tensor:  # noqa: ANN401 - a configuration class
    """Frequencies as transformers computes them, so that both rotate alike."""
    rope = _rope_type(config)
    if rope == "default":
        base = float(config.rope_parameters["rope_theta"])
        return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[rope](config, torch.device("cpu"))[0]
    return frequencies.float()
