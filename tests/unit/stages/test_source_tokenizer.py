from __future__ import annotations

from pathlib import Path

import pytest

from stages.errors import DataError
from stages.source_tokenizer import load_source_tokenizer
from stages.spec.source import HuggingFaceSource


def test_directory_without_a_tokenizer_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"is a directory without tokenizer.json, so the model has no tokenizer; copy"):
        load_source_tokenizer(HuggingFaceSource(type="hf", path=str(tmp_path)))
