"""Models with a scalar head: the first critic made from a backbone, and checks of critics and reward models.

Accepted directories: a causal language model (critic only; its head is dropped and a head of zeros put on, so that the
critic starts by saying 0), a token classifier or a sequence classifier with one label.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from plans.spec.llm import LlmShape
from stages.engines.weight_files import read_shapes, weight_files
from stages.errors import DataError, EngineError, SpecFaultsError
from stages.models.shape import check_shape

HeadRole = Literal["critic", "reward"]
"""What the head is for."""

_HEAD: Final = "score.weight"
_BIAS: Final = "score.bias"
_LM_HEAD: Final = "lm_head.weight"
_MAX_LISTED: Final = 5
_TOKENIZER_PATTERNS: Final = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja", "*.model")


def head_faults(directory: Path, role: HeadRole, shape: LlmShape, tokenizer: Any) -> list[str]:  # noqa: ANN401 - transformers has no useful type
    """Every reason why a directory can't be the job's critic or reward model, as complete sentences.

    Args:
        directory: `models.<role>.path` of the job.
        role: Critic or reward model.
        shape: `models.<role>.shape` of the job.
        tokenizer: The actor's.
    """
    if not (directory / "config.json").is_file():
        return [f"models.{role}.path {directory} has no config.json; give a complete Hugging Face model directory."]
    faults: list[str] = []
    try:
        check_shape(directory, shape, role, has_vocabulary_head=False)
    except SpecFaultsError as error:
        faults += error.faults
    except (DataError, EngineError) as error:
        return [str(error)]
    return [*faults, *_tensor_faults(directory, role), *_tokenizer_faults(directory, role, tokenizer)]


def write_first_critic(backbone: Path, shape: LlmShape, out_dir: Path) -> dict[str, Any]:
    """Write the critic that a backbone gives; `out_dir` must not exist.

    Returns:
        Facts: the directory it came from, and whether its head was made anew.

    Raises:
        SpecFaultsError: The backbone isn't of the shape, or tensors are missing or unknown.
    """
    check_shape(backbone, shape, "critic", has_vocabulary_head=False)
    faults = _tensor_faults(backbone, "critic")
    if faults:
        raise SpecFaultsError("the critic", faults)
    config = _config(backbone)
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(backbone):
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.offset_keys() if name != _LM_HEAD})
    is_fresh = _HEAD not in tensors
    dtype = next(iter(tensors.values())).dtype
    tensors.setdefault(_HEAD, torch.zeros(1, config.get_text_config().hidden_size, dtype=dtype))
    tensors.setdefault(_BIAS, torch.zeros(1, dtype=dtype))
    staged = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    for path in sorted({path for pattern in _TOKENIZER_PATTERNS for path in backbone.glob(pattern)}):
        shutil.copyfile(path, staged / path.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staged / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    model = _skeleton(config, "critic")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(staged)
    staged.rename(out_dir)
    return {"origin": str(backbone), "has_fresh_head": is_fresh}


def _config(directory: Path) -> Any:  # noqa: ANN401 - transformers has no useful type
    return AutoConfig.from_pretrained(directory, local_files_only=True)


def _skeleton(config: Any, role: HeadRole) -> Any:  # noqa: ANN401 - see above
    """Return the model without memory for its weights."""
    config.num_labels = 1
    auto = AutoModelForTokenClassification if role == "critic" else AutoModelForSequenceClassification
    with torch.device("meta"):
        return auto.from_config(config)


def _tensor_faults(directory: Path, role: HeadRole) -> list[str]:
    try:
        found = read_shapes(directory)
        wanted = {
            name: tuple(tensor.shape) for name, tensor in _skeleton(_config(directory), role).state_dict().items()
        }
    except (EngineError, ValueError) as error:
        return [f"models.{role}.path {directory} can't be used: {error}"]
    return _differences(directory, role, found, wanted)


def _differences(
    directory: Path, role: HeadRole, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> list[str]:
    # A causal language model may become a critic: it brings a head that goes, and lacks the one that is made.
    is_backbone = role == "critic" and _HEAD not in found and _is_causal(directory)
    optional = {_BIAS, *([_HEAD] if is_backbone else [])} if role == "critic" else set()
    dropped = {_LM_HEAD} if is_backbone else set()
    parts = {
        "missing tensors": sorted(set(wanted) - set(found) - optional),
        "unknown tensors": sorted(set(found) - set(wanted) - dropped),
        "other shapes": [
            f"{name} {found[name]} instead of {wanted[name]}"
            for name in sorted(set(found) & set(wanted))
            if found[name] != wanted[name]
        ],
    }
    remedy = (
        "give a causal language model, or a token or sequence classifier with one label"
        if role == "critic"
        else "give a sequence classifier with one label"
    )
    return [
        f"models.{role}.path {directory} has {what}: {', '.join(names[:_MAX_LISTED])}"
        f"{f' and {len(names) - _MAX_LISTED} more' if len(names) > _MAX_LISTED else ''}; {remedy}."
        for what, names in parts.items()
        if names
    ]


def _is_causal(directory: Path) -> bool:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())


def _tokenizer_faults(directory: Path, role: HeadRole, tokenizer: Any) -> list[str]:  # noqa: ANN401 - see above
    """Compare the meaning of token ids: a scalar-head model is given the actor's ids, never text."""
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True).get_vocab()
    except (OSError, ValueError) as error:
        return [f"models.{role}.path {directory} has no tokenizer that can be read ({error}); add the model's own."]
    ours: dict[str, int] = tokenizer.get_vocab()
    differing = sorted(
        (token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, theirs.get(token, 0)), token),
    )
    if not differing:
        return []
    shown = ", ".join(
        f"{token!r} is {theirs.get(token, 'absent')} instead of {ours.get(token, 'absent')}"
        for token in differing[:_MAX_LISTED]
    )
    return [
        f"models.{role}.path {directory} has another tokenizer than the actor: {len(differing)} tokens differ "
        f"({shown}); it is given the actor's token ids, so use a model with the actor's tokenizer."
    ]
