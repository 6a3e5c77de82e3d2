"""Engines by role and name."""

from __future__ import annotations

import pytest

from stages.engines.registry import engine_factory, engine_names
from stages.errors import EngineError


def test_each_role_knows_its_engines() -> None:
    assert engine_names("generation") == ("transformers", "vllm")
    assert engine_names("scoring") == ("transformers",)
    assert engine_names("training") == ("accelerate", "megatron")


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EngineError, match="no generation engine is called 'gguf'; choose one of: transformers, vllm"):
        engine_factory("generation", "gguf")
