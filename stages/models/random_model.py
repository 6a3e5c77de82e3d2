"""A model of a given shape with seeded random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from plans.spec.llm import LlmShape
from stages.errors import SpecFaultsError

_MAX_POSITIONS: Final = 4096
_FAMILIES: Final[Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
"""Config and model class by `source.architecture`."""


def make_random_model(architecture: str, shape: LlmShape, vocab_size: int, seed: int) -> Any:  # noqa: ANN401 - untyped
    """Model in fp32; equal arguments give equal weights.

    Args:
        architecture: Key of the families.
        shape: Numbers of the job.
        vocab_size: Tokens of the tokenizer; the shape must say the same.
        seed: Seed of the initialisation.

    Raises:
        SpecFaultsError: The shape's vocabulary is not the tokenizer's.
    """
    if shape.vocab != vocab_size:
        raise SpecFaultsError(
            "the job",
            [
                f"models.actor.shape.vocab is {shape.vocab}, but the tokenizer of source.alphabet has {vocab_size} "
                f"tokens (4 special ones and the characters); set vocab: {vocab_size}"
            ],
        )
    config_class, model_class = _FAMILIES[architecture]
    config = config_class(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=_MAX_POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    # transformers draws from torch's global generator; the caller's state is put back afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config)
