"""Layers of the decoder for megatron-core: its own parallel linear layers with torch's norm and attention.

megatron-core's stock norm refuses sequence parallelism, and its stock attention needs CUDA's random states. Torch's
RMSNorm and scaled-dot-product attention need neither Transformer Engine nor Apex and run on CPU and CUDA alike.

Legend of shapes: L padded length, B rows, H query heads of a shard, G key-value heads of a shard, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn


class RmsNorm(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Root-mean-square norm; under sequence parallelism each rank norms its part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:  # noqa: ANN401 - TransformerConfig
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Read by megatron-core, which then adds the gradients of the parts up.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, inputs: Tensor) -> Tensor:
        """Norm over the last dimension."""
        return nn.functional.rms_norm(inputs, self.weight.shape, self.weight, self.eps)


class CausalAttention(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Causal attention of a shard's heads by torch's kernels."""

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:  # noqa: ANN401 - megatron-core's
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, /, **_: Any  # noqa: ANN401
    ) -> Tensor:  # fmt: skip
        """Query [L, B, H, D], key and value [L, B, G, D] to output [L, B, H * D]; rows are padded on the right."""
        del attention_mask
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return output.permute(2, 0, 1, 3).flatten(2)


def decoder_spec(num_layers: int, *, has_head_norms: bool) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage and its final norm.

    Args:
        num_layers: Layers of the stage.
        has_head_norms: Whether queries and keys are normed head by head (Qwen3).
    """
    head_norm = RmsNorm if has_head_norms else None
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RmsNorm)
