"""The tokenizer of a job's source, without its weights; runs inside the child process of the preflight check."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from stages.errors import DataError
from stages.spec.source import GgufSource, HuggingFaceSource, Source

TOKENIZER_NAME: Final = "tokenizer.json"
"""File of a Hugging Face directory with the tokenizer; others are made from it."""


def load_source_tokenizer(source: Source) -> Any:  # noqa: ANN401 - transformers has no useful type
    """Return the tokenizer that the source's model will have.

    Raises:
        DataError: the source can't be read.
    """
    if isinstance(source, HuggingFaceSource):
        return _load_huggingface(source)
    if isinstance(source, GgufSource):
        return _load_gguf(source)
    from stages.models.character_tokenizer import make_character_tokenizer

    return make_character_tokenizer(source.alphabet)


def _load_huggingface(source: HuggingFaceSource) -> Any:  # noqa: ANN401 - see above
    path = Path(source.path).expanduser()
    if path.is_dir() and not (path / TOKENIZER_NAME).is_file():
        # transformers would name packages to install, which don't help.
        raise DataError(
            f"source.path {source.path!r} is a directory without {TOKENIZER_NAME}, so the model has no tokenizer; copy "
            "that file there from where the model comes from.",
            path=source.path,
        )
    from transformers import AutoTokenizer

    name = str(path) if path.is_dir() else source.path
    try:
        return AutoTokenizer.from_pretrained(name, revision=source.revision)
    except (OSError, ValueError) as error:
        raise DataError(
            f"source.path {source.path!r} gives no tokenizer ({error}); give a complete model directory, or a hub id "
            "that this machine can reach.",
            path=source.path,
        ) from error


def _load_gguf(source: GgufSource) -> Any:  # noqa: ANN401 - see above
    from stages.models.gguf_source import find_gguf, open_gguf
    from stages.models.gguf_tokenizer import make_gguf_tokenizer

    path = find_gguf(source)
    fields = {name: field.contents() for name, field in open_gguf(path).fields.items()}
    return make_gguf_tokenizer(fields, str(path))
