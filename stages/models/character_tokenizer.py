"""A tokenizer with one token per character, for small models that are made and warmed up as part of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3; the characters follow."""


def vocabulary(alphabet: str) -> dict[str, int]:
    """Ids by token: the special tokens, then the characters in the order of the alphabet (repeated ones once)."""
    return {token: place for place, token in enumerate([*SPECIAL_TOKENS, *dict.fromkeys(alphabet)])}


def make_character_tokenizer(alphabet: str) -> Any:  # noqa: ANN401 - transformers has no useful type
    """Tokenizer that puts `<bos>` in front of plain text and turns every character into one token."""
    tokens = vocabulary(alphabet)
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokens["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def save_character_tokenizer(alphabet: str, directory: Path) -> Any:  # noqa: ANN401 - see above
    """Write the tokenizer's files and return it."""
    tokenizer = make_character_tokenizer(alphabet)
    tokenizer.save_pretrained(directory)
    return tokenizer
