"""The shim reads `cuda` as `cpu` inside its block, and leaves no trace behind it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")
pytest.importorskip("megatron.core", reason="needs the extra megatron")

import torch
from megatron.core.tensor_parallel import random as megatron_random

from stages.engines.megatron.cpu_shim import megatron_on

pytestmark = pytest.mark.engines


def state() -> list[object]:
    tracker = megatron_random.CudaRNGStatesTracker
    return [
        torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.empty_cache,
        megatron_random._get_cuda_rng_state, megatron_random._set_cuda_rng_state, tracker.fork,
    ]  # fmt: skip


def test_cuda_is_the_cpu_within_the_block_only():
    before = state()
    with megatron_on("cpu"):
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).to(torch.device("cuda", 1)).device.type == "cpu"
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.cuda.current_device() == torch.device("cpu")
    assert state() == before
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda:7")


def test_shim_is_undone_after_a_failure():
    before = state()
    with pytest.raises(ValueError, match="inside"), megatron_on("cpu"):
        raise ValueError("inside")
    assert state() == before


def test_nothing_is_replaced_on_cuda():
    before = state()
    with megatron_on("cuda"):
        assert state() == before
        assert torch.zeros(2).type() == "torch.FloatTensor"
