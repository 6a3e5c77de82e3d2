"""Engines, layouts and single-process references for tests of the megatron engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stages.engines.launch import EngineLaunch
from stages.engines.megatron_engine import MegatronEngine
from tests.helpers.tiny_models import save_tokenizer
from tests.helpers.training_cases import training_launch


def save_family_model(
    directory: Path, family: str, *, layers: int = 5, tied: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """Write a small random model of a family: 4 query heads, 4 key-value heads, 16 tokens; return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = save_tokenizer(directory)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 256,
        "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**sizes, **changes}))
        with torch.no_grad():
            # Norms of 1 would hide a norm that is left out or mixed up with another.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def megatron_launch(**options: Any) -> EngineLaunch:
    """A launch of the megatron engine on CPU."""
    return training_launch(**options).model_copy(update={"name": "megatron"})


def megatron_engine(model_dir: Path, **options: Any) -> MegatronEngine:
    """An engine that holds version 0 of a model directory."""
    engine = MegatronEngine(megatron_launch(**options), model_dir)
    engine.load_checkpoint(model_dir, None, 0, "hash-0")
    return engine
