"""The tokenizer that a GGUF file carries: byte-level BPE with the pre-tokenizer that `tokenizer.ggml.pre` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from stages.errors import DataError

_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` for tokens that never come out of plain merging."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> Any:  # noqa: ANN401 - tokenizers is untyped
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_bytes() -> Any:  # noqa: ANN401 - see above
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_then_bytes(pattern: str) -> Any:  # noqa: ANN401 - see above
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], Any]]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_bytes,
    "llama-bpe": lambda: _split_then_bytes(_LLAMA3),
    "qwen2": lambda: _split_then_bytes(_QWEN2),
}
"""Pre-tokenizer by `tokenizer.ggml.pre`; a wrong one gives ids that the model wasn't trained on, without an error."""


def make_gguf_tokenizer(fields: Mapping[str, Any], where: str) -> Any:  # noqa: ANN401 - transformers has no useful type
    """Build the tokenizer from the file's metadata, chat template included.

    Args:
        fields: Metadata by key.
        where: File, for messages.

    Raises:
        DataError: Another kind of tokenizer, or an unknown pre-tokenizer.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise DataError(
            f"{where} has tokenizer {kind!r} with pre-tokenizer {pre!r}; known are gpt2 with "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}. Convert the model to Hugging Face format and use source hf",
            path=where,
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    types: list[int] = fields.get("tokenizer.ggml.token_type", [])
    special = [
        AddedToken(tokens[place], special=True, normalized=False) for place, t in enumerate(types) if t == _CONTROL
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(
        [AddedToken(tokens[place], normalized=False) for place, t in enumerate(types) if t == _USER_DEFINED]
    )
    named = _named_tokens(fields, tokens)
    backend.post_processor = _post_processor(fields, named, tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _named_tokens(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in found.items() if token_id is not None}


def _post_processor(fields: Mapping[str, Any], named: Mapping[str, str], tokens: list[str]) -> Any:  # noqa: ANN401
    bos = named.get("bos_token")
    if bos is None or not fields.get("tokenizer.ggml.add_bos_token", False):
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
    )
