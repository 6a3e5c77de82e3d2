"""A Hugging Face causal language model as two functions of padded tiles, with a key-value cache of our own.

Legend of shapes: B rows of a tile, L padded length, K key positions, G key-value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from stages.errors import EngineError
from stages.rl.matrix_products import use_products_in

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ATTENTION = "motley_grouped_sdpa"
_PLAIN_ATTENTION_MODELS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose attention is softmax(QK) V and nothing else."""


class TileCache:
    """Keys and values of one tile, a view of storage that belongs to the caller.

    Takes the place of a `transformers.Cache` in a forward pass whose masks and positions are given.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], position: int) -> None:
        self._keys = keys
        self._values = values
        self._position = position

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [B, G, L, D]; return all up to here [B, G, K, D]."""
        end = self._position + keys.shape[2]
        self._keys[layer][:, :, self._position : end] = keys
        self._values[layer][:, :, self._position : end] = values
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the positions already filled before this forward pass."""
        del layer
        return self._position


class CapturingCache:
    """Takes keys and values of a prefill as they come, one tensor per layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values [B, G, L, D] and return them; layers come in order."""
        if layer != len(self.keys):
            raise EngineError(
                f"layer {layer} came after {len(self.keys)} layers; the model shares caches between layers"
            )
        self.keys.append(keys)
        self.values.append(values)
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """Return 0: a prefill starts empty."""
        del layer
        return 0


class PaddedTokens:
    """Rows of token ids, padded on the left to one length and with dummy rows to one number of rows."""

    def __init__(self, rows: Sequence[Sequence[int]], num_rows: int, length: int) -> None:
        ids = torch.zeros(num_rows, length, dtype=torch.int64)
        padding = torch.full((num_rows,), length - 1, dtype=torch.int64)
        for index, row in enumerate(rows):
            padding[index] = length - len(row)
            ids[index, length - len(row) :] = torch.as_tensor(row, dtype=torch.int64)
        self.ids = ids
        """[B, L]"""
        self.padding = padding
        """Pad tokens before each row. [B]"""
        self.positions = (torch.arange(length) - padding.unsqueeze(-1)).clamp(min=0)
        """Position of each token in its row. [B, L]"""

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Return the additive causal mask; pad tokens see themselves only, nobody sees them. [B, 1, L, L]."""
        position = torch.arange(self.ids.shape[1])
        is_causal = position.unsqueeze(0) <= position.unsqueeze(1)
        is_token = position >= self.padding.view(-1, 1, 1)
        is_seen = (is_causal & is_token) | torch.eye(position.numel(), dtype=torch.bool)
        return additive_mask(is_seen, dtype).unsqueeze(1)


def additive_mask(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a key is seen and minus infinity elsewhere."""
    return torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, -torch.inf)


class CausalModel:
    """A model of a directory's architecture; its weights are random until they are loaded."""

    def __init__(self, model_dir: Path, dtype: str, device: str) -> None:
        self.config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        _require_full_attention(self.config, model_dir)
        self.dtype = DTYPES[dtype]
        self.device = torch.device(device)
        self.vocabulary: int = self.config.vocab_size
        with no_init_weights():
            module = AutoModelForCausalLM.from_config(
                self.config, dtype=self.dtype, attn_implementation=_attention_of(self.config, self.device)
            )
        module.tie_weights()
        use_products_in(module)
        self.module = module.to(self.device).eval().requires_grad_(requires_grad=False)

    def prefill(self, tokens: PaddedTokens) -> tuple[Tensor, CapturingCache]:
        """Run prompts; return the logits after the last token [B, V] and the cache."""
        cache = CapturingCache()
        return self._forward(tokens, keep=1, cache=cache)[:, -1], cache

    def score(self, tokens: PaddedTokens, keep: int) -> Tensor:
        """Return the logits at the last `keep` positions. [B, keep, V]."""
        return self._forward(tokens, keep=keep, cache=None)

    def decode(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: TileCache) -> Tensor:
        """Run one token per row: ids and positions [B, 1], additive mask [B, 1, 1, K]; return logits [B, V]."""
        output = self.module(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        return torch.as_tensor(output.logits)[:, -1]

    def _forward(self, tokens: PaddedTokens, keep: int, cache: CapturingCache | None) -> Tensor:
        output = self.module(
            input_ids=tokens.ids.to(self.device),
            position_ids=tokens.positions.to(self.device),
            attention_mask=tokens.attention_mask(self.dtype).to(self.device),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        return torch.as_tensor(output.logits)


def _grouped_sdpa(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,  # noqa: ANN401 - what models hand on
) -> tuple[Tensor, None]:
    """SDPA that lets the kernel share key-value heads; transformers copies them wherever there is a mask."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def _attention_of(config: Any, device: torch.device) -> str:  # noqa: ANN401 - a configuration class
    """Return the attention function for a model; only `eager` applies a soft cap to attention logits."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    return _ATTENTION if device.type == "cpu" and config.model_type in _PLAIN_ATTENTION_MODELS else "sdpa"


def _require_full_attention(config: Any, model_dir: Path) -> None:  # noqa: ANN401 - a configuration class
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise EngineError(
            f"{model_dir}: the transformers engine runs models with full attention in every layer, this one has "
            f"{sorted(kinds)}; use another engine for it",
            model_dir=str(model_dir),
        )


transformers.AttentionInterface.register(_ATTENTION, _grouped_sdpa)
