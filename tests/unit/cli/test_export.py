"""`motley export`: whole versions as they are, adapters alone or added to their base."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from typer.testing import CliRunner

from cli.app import build_app
from storage.policies import publish_policy
from storage.store import open_store

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with a whole version 0 and an adapter as version 1."""
    store = open_store(str(tmp_path / "store"), is_synced=False)
    whole = {"model.safetensors": save({f"{LAYER}.weight": np.eye(2, dtype=np.float32)}), "config.json": b"{}"}
    base = publish_policy(store, "r", 0, whole, created_by="t")
    name = f"base_model.model.{LAYER}"
    tensors = {
        f"{name}.lora_A.weight": np.ones((1, 2), np.float32),
        f"{name}.lora_B.weight": np.ones((2, 1), np.float32),
    }
    config = json.dumps({"r": 1, "lora_alpha": 2}).encode()
    adapter = {"adapter_model.safetensors": save(tensors), "adapter_config.json": config}
    publish_policy(store, "r", 1, adapter, created_by="t", adapter_base=base)
    return tmp_path / "store"


def export(root: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["export", f"{root}/r", *arguments])
    return result.exit_code, f"{result.output}{result.exception}"


def test_newest_version_is_the_base_with_the_adapter_added(root: Path, tmp_path: Path) -> None:
    code, text = export(root, "--to", str(tmp_path / "out"))
    assert code == 0, text
    assert "changed 100.0% of 4 adapted weights" in " ".join(text.split())
    merged = load_file(tmp_path / "out" / "model.safetensors")[f"{LAYER}.weight"]
    assert merged.tolist() == [[3.0, 2.0], [2.0, 3.0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_adapter_alone_and_whole_version(root: Path, tmp_path: Path) -> None:
    assert export(root, "--to", str(tmp_path / "adapter"), "--form", "adapter")[0] == 0
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json",
    }  # fmt: skip
    assert export(root, "--to", str(tmp_path / "base"), "--version", "0")[0] == 0
    base = load_file(tmp_path / "base" / "model.safetensors")[f"{LAYER}.weight"]
    assert base.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_what_can_not_be_written_is_said(root: Path, tmp_path: Path) -> None:
    code, text = export(root, "--to", str(tmp_path / "no"), "--version", "0", "--form", "adapter")
    assert (code != 0, "is no adapter" in text) == (True, True)
    (tmp_path / "there").mkdir()
    code, text = export(root, "--to", str(tmp_path / "there"))
    assert (code != 0, "exists already" in text) == (True, True)
    assert not (tmp_path / "no").exists()
