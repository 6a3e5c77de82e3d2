"""The shape of a model directory in the planner's terms, and the comparison with what a job says. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plans.spec.llm import LlmShape
from stages.engines.weight_files import read_shapes
from stages.errors import DataError, SpecFaultsError

_HEAD = "lm_head.weight"


def describe(model_dir: Path) -> LlmShape:
    """Numbers of a dense decoder-only model from its config and the headers of its weights.

    Args:
        model_dir: Hugging Face directory with config.json and safetensors.

    Raises:
        SpecFaultsError: The config lacks a number, or the model is a mixture of experts.
        DataError: config.json is missing or damaged.
        EngineError: Weight files are missing or damaged.
    """
    config = _read_config(model_dir)
    text: dict[str, Any] = {**config, **config.get("text_config", {})}
    missing = [
        key
        for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if not isinstance(text.get(key), int)
    ]
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)]
    if missing or experts:
        faults = [f"{key} is missing in {model_dir}/config.json" for key in missing]
        faults += [f"{key} in {model_dir}/config.json: only dense models are supported" for key in experts]
        raise SpecFaultsError("the model", faults)
    heads = text["num_attention_heads"]
    return LlmShape(
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab=text["vocab_size"],
        tied=_is_tied(model_dir, config),
    )


def check_shape(model_dir: Path, wanted: LlmShape, role: str, *, has_vocabulary_head: bool = True) -> LlmShape:
    """Refuse a model that is not of the shape that the job plans with.

    Args:
        model_dir: The real model.
        wanted: `models.<role>.shape` of the job.
        role: `actor`, `reference` ...
        has_vocabulary_head: False for critics and reward models, of which `tied` says nothing.

    Returns:
        The shape found.

    Raises:
        SpecFaultsError: Names every number that differs, and both values.
    """
    found = describe(model_dir)
    faults = [
        f"models.{role}.shape.{name} is {getattr(wanted, name)}, but the model in {model_dir} has "
        f"{getattr(found, name)}"
        for name in LlmShape.model_fields
        if getattr(wanted, name) != getattr(found, name) and (has_vocabulary_head or name != "tied")
    ]
    if faults:
        raise SpecFaultsError("the job", faults)
    return found


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}); give a complete model directory", path=str(path)) from error
    if not isinstance(config, dict):
        raise DataError(f"{path} is not a JSON object; give a complete model directory", path=str(path))
    return config


def _is_tied(model_dir: Path, config: dict[str, Any]) -> bool:
    declared = config.get("tie_word_embeddings")
    # Families differ in the default, so without a word of the config the weights decide.
    return declared if isinstance(declared, bool) else _HEAD not in read_shapes(model_dir)
