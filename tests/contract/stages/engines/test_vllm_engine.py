"""The engine contract, held by vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")
pytest.importorskip("vllm", reason="needs vLLM")

from stages.engines.protocol import GenerationEngine
from stages.engines.vllm_engine import VllmEngine
from stages.spec.execution import LoraSpec
from tests.contract.adapter_contract import AdapterContract, BuildAdapterEngine
from tests.contract.engine_contract import BuildEngine, EngineContract, contract_launch

pytestmark = [pytest.mark.engines, pytest.mark.vllm]


class TestVllmEngine(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def build(cls) -> Iterator[BuildEngine]:
        # Engines in one process share vLLM's process groups, which go when the first of them goes: all stay to the end.
        engines: list[VllmEngine] = []

        def build(model_dir: Path) -> GenerationEngine:
            engines.append(VllmEngine(contract_launch("vllm"), model_dir))
            return engines[-1]

        yield build
        for engine in engines:
            engine.close()


class TestVllmAdapters(AdapterContract):
    @pytest.fixture(scope="class")
    @classmethod
    def build(cls) -> Iterator[BuildAdapterEngine]:
        engines: list[VllmEngine] = []

        def build(model_dir: Path, lora: LoraSpec | None) -> GenerationEngine:
            engines.append(VllmEngine(contract_launch("vllm", lora=lora), model_dir))
            return engines[-1]

        yield build
        for engine in engines:
            engine.close()
