"""Built-in GPU types and model shapes."""

from __future__ import annotations

import pytest

from plans.spec.cluster import single_machine
from plans.spec.gpu_catalog import GPU_CATALOG, GpuType
from plans.spec.llm import BUILT_IN_SHAPES


def test_catalogue_holds_the_promised_types() -> None:
    promised = {"A100-40", "A100-80", "H100", "H200", "H20", "H800", "B200", "L40S", "L4", "A10G", "V100", "RTX 4090",
                "MI300X", "cpu"}  # fmt: skip
    assert promised <= set(GPU_CATALOG)


@pytest.mark.parametrize(("memory_gb", "reserve_gb"), [(80.0, 2.0), (24.0, 1.2), (4.0, 0.2)])
def test_reserve_is_five_per_cent_and_at_most_two_gigabytes(memory_gb: float, reserve_gb: float) -> None:
    gpu = GpuType(memory_gb=memory_gb, tflops=1, hbm_gb_s=1, usd_per_hour=0)
    assert gpu.reserve_bytes == pytest.approx(reserve_gb * 1e9)
    assert gpu.model_copy(update={"reserve_gb": 0.5}).reserve_bytes == 0.5e9


@pytest.mark.parametrize(
    ("name", "billions", "layer_millions"),
    [("qwen3-1.7b", 1.72, 50.34), ("qwen3-4b", 4.02, 100.93), ("qwen3-8b", 8.19, 192.95), ("qwen3-14b", 14.77, 330.31)],
)
def test_parameter_counts_equal_the_published_ones(name: str, billions: float, layer_millions: float) -> None:
    shape = BUILT_IN_SHAPES[name]
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=6e-3)
    assert shape.layer_parameters / 1e6 == pytest.approx(layer_millions, abs=1.2e-2)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-32b", 32.76), ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("smollm2-135m", 0.1345),
     ("smollm2-360m", 0.3618)],
)  # fmt: skip
def test_other_built_in_shapes_have_their_names_size(name: str, billions: float) -> None:
    assert BUILT_IN_SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("name", "kv_bytes"), [("qwen3-4b", 147456), ("qwen3-8b", 147456), ("qwen3-14b", 163840)])
def test_cache_bytes_per_token_equal_the_published_ones(name: str, kv_bytes: int) -> None:
    shape = BUILT_IN_SHAPES[name]
    assert shape.layers * shape.kv_bytes_per_token_per_layer == kv_bytes


def test_single_machine_is_a_cluster_of_one() -> None:
    cluster = single_machine("cpu", 2)
    assert cluster.view.gpu_ids == ("local/0", "local/1")
    assert len(cluster.fingerprint) == 64
