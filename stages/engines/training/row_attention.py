"""Attention over rows that share their prompt's tokens.

The decoder runs on one flat sequence of distinct tokens, so a prompt is computed once for all its completions and
padding not at all. Only attention needs rows: it gathers each row's queries, keys and values from the flat sequence and
hands back each token's output from the first row that it stands in. A prompt token sees nothing but its prompt, so it
has the same output, up to rounding, in every row.

Legend of shapes: U distinct tokens, B rows, L padded length, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

NAME = "motley_row_attention"
"""Name under which transformers knows it."""
_PLAIN_ATTENTION_MODELS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose attention is softmax(QK) V and nothing else, and whose layers hand keyword arguments on."""


def supports_row_attention(config: Any) -> bool:  # noqa: ANN401 - a configuration class
    """Whether every layer of a model has plain attention to all tokens before."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_windowed = kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None
    return config.model_type in _PLAIN_ATTENTION_MODELS and not is_windowed


def _row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    row_places: Tensor | None = None,
    token_owners: Tensor | None = None,
    **_: Any,  # noqa: ANN401 - what models hand on
) -> tuple[Tensor, None]:
    """Query, key, value [1, H, U, D] to output [1, U, H, D]; without `row_places` the usual causal attention."""
    del module
    if row_places is None or token_owners is None:
        output = _causal_attention(query, key, value, dropout, scaling)
        return output.transpose(1, 2).contiguous(), None
    query, key, value = (_gather(states, row_places) for states in (query, key, value))
    output = _causal_attention(query, key, value, dropout, scaling)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, token_owners).unsqueeze(0), None


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
    )


def _gather(states: Tensor, row_places: Tensor) -> Tensor:
    """States [1, H, U, D] as rows [B, H, L, D]."""
    flat = states[0].transpose(0, 1)
    return flat.index_select(0, row_places.flatten()).unflatten(0, row_places.shape).transpose(1, 2)


transformers.AttentionInterface.register(NAME, _row_attention)
