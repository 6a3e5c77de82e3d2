"""W + alpha / r * B A by hand, in the types that weights come in; needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from stages.adapter_merge import _from_fp32, _to_fp32, merge_adapter
from stages.errors import ContractError

LAYER = "model.layers.0.mlp.up_proj"


def write_base(folder: Path, weight: np.ndarray) -> Path:
    folder.mkdir()
    save_file({f"{LAYER}.weight": weight, "model.norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_adapter(folder: Path, up: np.ndarray, down: np.ndarray, *, layer: str = LAYER, alpha: float = 4.0) -> Path:
    folder.mkdir()
    name = f"base_model.model.{layer}"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, folder / "adapter_model.safetensors")
    config = {"r": down.shape[0], "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_update_is_added_with_its_factor_and_the_rest_is_copied(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    up, down = np.array([[1.0], [0.0]], np.float32), np.array([[10.0, 20.0]], np.float32)  # rank 1, factor 4
    facts = merge_adapter(base, write_adapter(tmp_path / "adapter", up, down), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged[f"{LAYER}.weight"].tolist() == [[41.0, 82.0], [3.0, 4.0]]
    assert merged["model.norm.weight"].tolist() == [1.0, 1.0]
    assert (facts.num_tensors, facts.num_elements, facts.num_changed) == (1, 4, 2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }


def test_half_precision_loses_what_is_below_its_grid_and_says_so(tmp_path: Path) -> None:
    """1 + 2^-12 is no fp16 number: the update is lost, and counted as lost."""
    base = write_base(tmp_path / "base", np.ones((2, 2), np.float16))
    up, down = np.array([[2.0**-12], [1.0]], np.float32), np.ones((1, 2), np.float32)
    facts = merge_adapter(base, write_adapter(tmp_path / "adapter", up, down, alpha=1.0), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")[f"{LAYER}.weight"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert (facts.num_elements, facts.num_changed) == (4, 2)


@pytest.mark.parametrize("case", ["layer", "shape", "infinite"])
def test_an_adapter_that_does_not_belong_is_refused(tmp_path: Path, case: str) -> None:
    base = write_base(tmp_path / "base", np.ones((2, 2), np.float32))
    up, down = np.ones((2, 1), np.float32), np.ones((1, 3 if case == "shape" else 2), np.float32)
    layer = "model.layers.9.mlp.up_proj" if case == "layer" else LAYER
    adapter = write_adapter(
        tmp_path / "adapter", up * np.float32(np.inf if case == "infinite" else 1), down, layer=layer
    )
    with pytest.raises(ContractError):
        merge_adapter(base, adapter, tmp_path / "out")


@given(st.integers(0, 0xFFFF))
def test_every_finite_bf16_number_survives_fp32(bits: int) -> None:
    data = np.array([bits], "<u2").tobytes()
    value = _to_fp32(data, "BF16")
    if np.isfinite(value).all():
        assert _from_fp32(value, "BF16").tobytes() == data


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120))
def test_bf16_is_the_nearest_number(value: float) -> None:
    """Ties go to the even one: no other bf16 number is nearer."""
    rounded = _from_fp32(np.array([value], np.float32), "BF16")
    bits = int(rounded[0])
    near = [_to_fp32(np.array([b & 0xFFFF], "<u2").tobytes(), "BF16")[0] for b in (bits - 1, bits, bits + 1)]
    gaps = [abs(float(one) - value) for one in near if np.isfinite(one)]
    assert abs(float(near[1]) - value) == min(gaps)
    if gaps.count(min(gaps)) > 1:
        assert bits % 2 == 0
