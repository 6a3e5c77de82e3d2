"""The engine contract, held by the transformers engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

from stages.engines.protocol import GenerationEngine
from stages.engines.transformers_engine import TransformersEngine
from tests.contract.engine_contract import BuildEngine, EngineContract, contract_launch

pytestmark = pytest.mark.engines


class TestTransformersEngine(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def build(cls) -> BuildEngine:
        def build(model_dir: Path) -> GenerationEngine:
            return TransformersEngine(contract_launch("transformers"), model_dir)

        return build
