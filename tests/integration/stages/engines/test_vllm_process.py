"""vLLM in an engine process of its own: start, update in place, failure, end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")
pytest.importorskip("vllm", reason="needs vLLM")

from stages.engines.launch import EngineLaunch
from stages.engines.manager import EngineManager
from stages.engines.protocol import GenerationRequest, ScoredTokens
from stages.errors import EngineError
from tests.helpers.tiny_models import save_tiny_model

pytestmark = [pytest.mark.engines, pytest.mark.vllm]


def test_vllm_process_serves_updates_and_ends(tmp_path: Path) -> None:
    first, second = save_tiny_model(tmp_path / "first", seed=1), save_tiny_model(tmp_path / "second", seed=2)
    launch = EngineLaunch(
        role="generation",
        name="vllm",
        run="vllm-process",
        machine="here",
        max_prompt_tokens=32,
        max_completion_tokens=8,
        max_num_seqs=16,
    )
    requests = [
        GenerationRequest(prompt_token_ids=[1, 5, 6], seed=seed, max_tokens=8, temperature=0.7) for seed in range(8)
    ]
    manager = EngineManager(tmp_path / "state")
    try:
        engine = manager.acquire(launch, first, 240.0)
        engine.load_weights(first, 0, "first")
        completions = engine.generate(requests)
        rows = [
            ScoredTokens(prompt_token_ids=[1, 5, 6], completion_token_ids=done.token_ids, temperature=0.7)
            for done in completions
        ]
        for done, scores in zip(completions, engine.score(rows), strict=True):
            assert scores == pytest.approx(list(done.logprobs), abs=2e-4)
        with pytest.raises(EngineError, match="can't be loaded"):
            engine.load_weights(tmp_path / "nowhere", 1, "x")
        engine.load_weights(second, 1, "second")
        assert engine.info().policy_version == 1
        assert engine.generate(requests) != completions
        assert manager.acquire(launch, second, 60.0).record.pid == engine.record.pid
    finally:
        assert manager.stop_all() <= 1
    assert manager.list() == []
