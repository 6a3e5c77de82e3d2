"""Model directories are checked before they are let near an engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.engines.architecture import architecture_differences, read_architecture, require_same_architecture
from stages.engines.weight_files import read_shapes, validate_weights, weight_files
from stages.errors import EngineError

SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model in two files with an index."""
    save_file({"a": np.zeros((2, 3)), "b": np.zeros(4)}, tmp_path / "model-1.safetensors")
    save_file({"c": np.zeros(1)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "dtype": "float32"}))
    return tmp_path


def test_shapes_come_from_all_files_of_the_index(directory: Path) -> None:
    (directory / "left-over.safetensors").write_bytes(b"not in the index")
    assert [file.name for file in weight_files(directory)] == ["model-1.safetensors", "model-2.safetensors"]
    assert read_shapes(directory) == SHAPES


def test_missing_shard_is_named(directory: Path) -> None:
    (directory / "model-2.safetensors").unlink()
    with pytest.raises(EngineError, match=r"missing files: model-2.safetensors"):
        weight_files(directory)


def test_all_faults_of_a_directory_are_named_together(directory: Path) -> None:
    expected = {"a": (3, 2), "b": (4,), "d": (1,), "e": (1,)}
    with pytest.raises(EngineError) as caught:
        validate_weights(directory, expected, optional=["e"])
    assert caught.value.attributes["reason"] == (
        "missing tensors: d; unknown tensors: c; other shapes: a (2, 3) instead of (3, 2)"
    )


def test_fitting_directory_passes(directory: Path) -> None:
    validate_weights(directory, {**SHAPES, "head": (9,)}, optional=["head"])
    assert read_architecture(directory) == {"hidden_size": 8}


def test_architectures_differ_only_where_both_say_something() -> None:
    held = {"hidden_size": 8, "rope_theta": 1.0}
    assert architecture_differences(held, {"hidden_size": 8, "num_layers": 2}) == []
    assert architecture_differences(held, {"hidden_size": 9, "rope_theta": 2.0}) == [
        "hidden_size is 9 instead of 8",
        "rope_theta is 2.0 instead of 1.0",
    ]


def test_other_architecture_is_refused(directory: Path) -> None:
    with pytest.raises(EngineError, match="another architecture: hidden_size is 8 instead of 9"):
        require_same_architecture(directory, {"hidden_size": 9})


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_config_that_is_no_object_is_refused(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"config\.json"):
        read_architecture(directory)
