"""Shards of parameters from Hugging Face tensors and back, for every degree that divides the heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engines.megatron.layout import MegatronLayout, slice_bounds
from stages.engines.megatron.weight_map import put_together, stage_parameters, take_apart

pytestmark = pytest.mark.engines


@st.composite
def models(draw):
    """Sizes of a model and a tensor-parallel degree that divides its heads."""
    tp, groups, queries = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kv_heads, head_dim = tp * groups, draw(st.sampled_from([2, 4]))
    config = SimpleNamespace(
        heads=kv_heads * queries, kv_heads=kv_heads, head_dim=head_dim, hidden=6,
        intermediate=tp * draw(st.integers(1, 3)), vocab=draw(st.integers(1, 9)),
        is_tied=draw(st.booleans()), has_head_norms=draw(st.booleans()),
    )  # fmt: skip
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return config, MegatronLayout(tp=tp, stage_layers=tuple(layers), shares=(1,))


def shapes(config):
    return {
        "q_proj": (config.heads * config.head_dim, config.hidden),
        "k_proj": (config.kv_heads * config.head_dim, config.hidden),
        "v_proj": (config.kv_heads * config.head_dim, config.hidden),
        "o_proj": (config.hidden, config.heads * config.head_dim),
        "gate_proj": (config.intermediate, config.hidden),
        "up_proj": (config.intermediate, config.hidden),
        "down_proj": (config.hidden, config.intermediate),
        "embed_tokens": (config.vocab, config.hidden),
        "lm_head": (config.vocab, config.hidden),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }


def tensor_of(name, config):
    shape = shapes(config).get(name.split(".")[-2], (config.hidden,))
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@settings(deadline=None)
@given(models())
def test_parts_of_all_shards_are_the_tensors_again(model):
    config, layout = model
    for stage in range(layout.pp):
        for mapped in stage_parameters(config, layout, stage):
            sources = [tensor_of(name, config) for name in mapped.sources]
            taken = []
            for shard in range(layout.tp):
                parts = sources
                if mapped.dim is not None:
                    bounds = [slice_bounds(source.shape[mapped.dim], shard, layout.tp) for source in sources]
                    parts = [
                        source.narrow(mapped.dim, start, end - start)
                        for source, (start, end) in zip(sources, bounds, strict=True)
                    ]
                taken.append(take_apart(mapped, put_together(mapped, parts, config.head_dim), config))
            for place, source in enumerate(sources):
                pieces = [parts[place] for parts in taken]
                for piece in pieces if mapped.dim is None else [torch.cat(pieces, dim=mapped.dim)]:
                    assert torch.equal(piece, source)


@settings(deadline=None)
@given(models())
def test_every_tensor_has_one_stage_that_writes_it(model):
    config, layout = model
    written = [
        name
        for stage in range(layout.pp)
        for mapped in stage_parameters(config, layout, stage)
        if not mapped.is_copy
        for name in mapped.sources
    ]

    per_layer = 9 + 2 * config.has_head_norms
    assert len(written) == len(set(written)) == sum(layout.stage_layers) * per_layer + (2 if config.is_tied else 3)


@settings(deadline=None)
@given(models())
def test_queries_keys_and_values_of_a_group_lie_side_by_side(model):
    config, layout = model
    mapped = next(m for m in stage_parameters(config, layout, 0) if m.joint == "qkv")
    query, key, value = (tensor_of(name, config) for name in mapped.sources)

    joint = put_together(mapped, [query, key, value], config.head_dim)

    width = config.heads // config.kv_heads * config.head_dim
    assert torch.equal(joint[:width], query[:width])
    assert torch.equal(joint[width : width + config.head_dim], key[: config.head_dim])
    assert torch.equal(joint[width + config.head_dim : width + 2 * config.head_dim], value[: config.head_dim])
