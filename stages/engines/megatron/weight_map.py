"""Which Hugging Face tensors a parameter of megatron-core is made of, and how; pure tensor arithmetic.

Tensor parallelism slices every tensor along one dimension into contiguous parts, so a rank reads its parts alone and
puts them together: queries, keys and values side by side for each key-value head, gate over up projection. The inverse
takes a rank's parameter apart again; parts of all ranks, joined along the dimension, are the tensor.

Legend of shapes: T tensor shards, G key-value heads of a shard, Q query heads per key-value head, D head dimension,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.engines.megatron.layout import MegatronLayout
from stages.engines.megatron.model_config import ModelConfig

Joint = Literal["alone", "stacked", "qkv"]
"""How the tensors of a parameter lie in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedParameter:
    """A parameter of one pipeline stage."""

    name: str
    """megatron-core's name."""
    sources: tuple[str, ...]
    """Hugging Face names of the tensors in it."""
    dim: int | None = None
    """Dimension along which shards cut the tensors; None = every shard has them whole."""
    joint: Joint = "alone"
    """How the tensors lie in the parameter."""
    is_copy: bool = False
    """Whether another stage has the tensor too and writes it (tied head of the last stage)."""


def stage_parameters(config: ModelConfig, layout: MegatronLayout, stage: int) -> list[MappedParameter]:
    """Return every parameter of a pipeline stage, in the order of the model."""
    is_first, is_last = stage == 0, stage == layout.pp - 1
    found: list[MappedParameter] = []
    if is_first:
        found.append(
            MappedParameter(name="embedding.word_embeddings.weight", sources=("model.embed_tokens.weight",), dim=0)
        )
    for place in range(layout.stage_layers[stage]):
        found += _layer(config, place, layout.first_layer(stage) + place)
    if is_last:
        found.append(MappedParameter(name="decoder.final_layernorm.weight", sources=("model.norm.weight",)))
        if not config.is_tied:
            found.append(MappedParameter(name="output_layer.weight", sources=("lm_head.weight",), dim=0))
        elif not is_first:
            found.append(
                MappedParameter(name="output_layer.weight", sources=("model.embed_tokens.weight",), dim=0, is_copy=True)
            )
    return found


def _layer(config: ModelConfig, place: int, layer: int) -> Iterator[MappedParameter]:
    ours, theirs = f"decoder.layers.{place}", f"model.layers.{layer}"

    def mapped(name: str, *sources: str, dim: int | None = None, joint: Joint = "alone") -> MappedParameter:
        full = tuple(f"{theirs}.{source}.weight" for source in sources)
        return MappedParameter(name=f"{ours}.{name}.weight", sources=full, dim=dim, joint=joint)

    yield mapped("input_layernorm", "input_layernorm")
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield mapped("self_attention.linear_qkv", *projections, dim=0, joint="qkv")
    if config.has_head_norms:
        yield mapped("self_attention.q_layernorm", "self_attn.q_norm")
        yield mapped("self_attention.k_layernorm", "self_attn.k_norm")
    yield mapped("self_attention.linear_proj", "self_attn.o_proj", dim=1)
    yield mapped("pre_mlp_layernorm", "post_attention_layernorm")
    yield mapped("mlp.linear_fc1", "mlp.gate_proj", "mlp.up_proj", dim=0, joint="stacked")
    yield mapped("mlp.linear_fc2", "mlp.down_proj", dim=1)


def put_together(mapped: MappedParameter, parts: Sequence[Tensor], head_dim: int) -> Tensor:
    """Return a shard's parameter from its slices of the sources, in their order."""
    if mapped.joint == "alone":
        return parts[0]
    if mapped.joint == "stacked":
        return torch.cat(list(parts))
    groups = parts[1].shape[0] // head_dim
    by_group = [part.reshape(groups, -1, part.shape[-1]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def take_apart(mapped: MappedParameter, local: Tensor, config: ModelConfig) -> list[Tensor]:
    """Return a shard's slices of the sources from its parameter; the inverse of `put_together`."""
    if mapped.joint == "alone":
        return [local]
    if mapped.joint == "stacked":
        return list(local.chunk(2))
    queries, dim = config.heads // config.kv_heads, config.head_dim
    by_group = local.reshape(-1, (queries + 2) * dim, local.shape[-1])
    return [part.flatten(0, 1) for part in by_group.split([queries * dim, dim, dim], dim=1)]
