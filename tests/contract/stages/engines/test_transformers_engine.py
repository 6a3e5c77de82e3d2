"""The engine contract, held by the transformers engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

from stages.engines.protocol import GenerationEngine
from stages.engines.transformers_engine import TransformersEngine
from stages.spec.execution import LoraSpec
from tests.contract.adapter_contract import AdapterContract, BuildAdapterEngine
from tests.contract.engine_contract import (
    TOLERANCE,
    BuildEngine,
    EngineContract,
    contract_launch,
    largest_gap,
    make_requests,
    tokens_of,
)

pytestmark = pytest.mark.engines


class TestTransformersEngine(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def build(cls) -> BuildEngine:
        def build(model_dir: Path) -> GenerationEngine:
            return TransformersEngine(contract_launch("transformers"), model_dir)

        return build

    def test_completion_goes_on_where_an_interrupted_call_ended(self, engine: GenerationEngine) -> None:
        """The draws depend on seed and position: the rest is what one call would have sampled."""
        requests = make_requests(12, max_tokens=10, stop_token_ids=[])
        whole = engine.generate(requests)
        cut = [place % 9 + 1 for place in range(12)]
        asked = [
            replace(request, sampled_token_ids=list(done.token_ids[:count]))
            for request, done, count in zip(requests, whole, cut, strict=True)
        ]
        rest = engine.generate(asked)
        assert tokens_of(rest) == [list(done.token_ids[count:]) for done, count in zip(whole, cut, strict=True)]
        expected = [list(done.logprobs[count:]) for done, count in zip(whole, cut, strict=True)]
        assert largest_gap([list(done.logprobs) for done in rest], expected) < TOLERANCE


class TestTransformersAdapters(AdapterContract):
    @pytest.fixture(scope="class")
    @classmethod
    def build(cls) -> BuildAdapterEngine:
        def build(model_dir: Path, lora: LoraSpec | None) -> GenerationEngine:
            return TransformersEngine(contract_launch("transformers", lora=lora), model_dir)

        return build
