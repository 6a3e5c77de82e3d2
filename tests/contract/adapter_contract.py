"""What every generation engine must do with policies that are adapters, as one class of tests.

A subclass gives the fixture `build`, which makes an engine for a model directory and, where asked, for adapters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.engines.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from stages.engines.protocol import GenerationEngine, GenerationRequest, ScoredTokens
from stages.errors import EngineError
from stages.spec.execution import LoraSpec
from tests.contract.engine_contract import (
    TOLERANCE,
    largest_gap,
    make_prompt,
    make_requests,
    tokens_of,
    torch_logprobs,
)
from tests.helpers.adapter_cases import LORA, base_at, hash_at, save_adapter, save_merged
from tests.helpers.tiny_models import save_tiny_model

BuildAdapterEngine = Callable[[Path, LoraSpec | None], GenerationEngine]


class AdapterContract:
    """Tests of a generation engine that samples from a base with an adapter."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("adapters")

    @pytest.fixture(scope="class")
    @classmethod
    def base_dir(cls, folder: Path) -> Path:
        return save_tiny_model(folder / "base", seed=1)

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, folder: Path, base_dir: Path) -> list[Path]:
        return [save_adapter(folder / f"adapter-{seed}", base_dir, seed=seed) for seed in (5, 6)]

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, build: BuildAdapterEngine, base_dir: Path) -> GenerationEngine:
        return build(base_dir, LORA)

    @pytest.fixture
    def engine(self, shared: GenerationEngine, base_dir: Path, adapters: list[Path]) -> GenerationEngine:
        shared.load_weights(base_dir, 0, hash_at(base_dir))
        shared.load_weights(adapters[0], 1, "first", base_at(base_dir))
        return shared

    def test_samples_and_scores_are_those_of_the_merged_model(
        self, engine: GenerationEngine, base_dir: Path, adapters: list[Path], folder: Path
    ) -> None:
        """The oracle adds alpha / r * B A to the weights in plain torch; also at a temperature."""
        merged = save_merged(folder / "merged", base_dir, adapters[0])
        requests = make_requests(8, temperature=0.7)
        completions = engine.generate(requests)
        expected = [
            torch_logprobs(merged, list(request.prompt_token_ids), list(done.token_ids), 0.7)
            for request, done in zip(requests, completions, strict=True)
        ]
        assert largest_gap([list(done.logprobs) for done in completions], expected) < TOLERANCE
        rows = [
            ScoredTokens(
                prompt_token_ids=request.prompt_token_ids, completion_token_ids=done.token_ids, temperature=0.7
            )
            for request, done in zip(requests, completions, strict=True)
        ]
        assert largest_gap(engine.score(rows), expected) < TOLERANCE
        assert {(done.policy_version, done.weights_hash) for done in completions} == {(1, "first")}

    def test_base_comes_back_exactly(self, engine: GenerationEngine, base_dir: Path, adapters: list[Path]) -> None:
        """Nothing of an adapter stays in the weights: the bare base scores bit for bit as before any adapter."""
        rows = [
            ScoredTokens(prompt_token_ids=make_prompt(index, 5 + index), completion_token_ids=make_prompt(index, 6))
            for index in range(6)
        ]
        with_adapter = engine.score(rows)
        engine.load_weights(base_dir, 0, hash_at(base_dir))
        bare = engine.score(rows)
        engine.load_weights(adapters[1], 2, "second", base_at(base_dir))
        engine.load_weights(base_dir, 0, hash_at(base_dir))
        assert engine.score(rows) == bare
        assert largest_gap(with_adapter, bare) > 0.1
        engine.load_weights(adapters[0], 1, "first", base_at(base_dir))
        assert engine.score(rows) == with_adapter

    def test_next_adapter_takes_the_place_of_the_one_before(
        self, engine: GenerationEngine, build: BuildAdapterEngine, base_dir: Path, adapters: list[Path]
    ) -> None:
        """Never stacked, and no prefix of the old weights is reused: the samples are a fresh engine's."""
        requests = [
            GenerationRequest(prompt_token_ids=make_prompt(length, length), seed=length, max_tokens=8, temperature=1.0)
            for length in (20, 150, 300)
        ]
        engine.generate(requests)
        engine.load_weights(adapters[1], 2, "second", base_at(base_dir))
        fresh = build(base_dir, LORA)
        fresh.load_weights(adapters[1], 2, "second", base_at(base_dir))
        assert tokens_of(engine.generate(requests)) == tokens_of(fresh.generate(requests))

    def test_tokens_do_not_depend_on_the_batch(self, engine: GenerationEngine) -> None:
        requests = make_requests(24)
        whole = tokens_of(engine.generate(requests))
        assert engine.info().is_batch_invariant
        assert tokens_of(engine.generate(requests[::-1]))[::-1] == whole
        assert [tokens_of(engine.generate([request]))[0] for request in requests[:5]] == whole[:5]

    @pytest.mark.parametrize("damage", ["missing", "no_config", "torn", "rank", "alpha", "targets", "names"])
    def test_unfit_adapter_is_refused_and_the_engine_goes_on(
        self, engine: GenerationEngine, base_dir: Path, adapters: list[Path], tmp_path: Path, damage: str
    ) -> None:
        bad = damaged_adapter(adapters[1], base_dir, tmp_path / "bad", damage)
        before = tokens_of(engine.generate(make_requests(4)))
        with pytest.raises(EngineError, match="can't be loaded"):
            engine.load_weights(bad, 9, "bad", base_at(base_dir))
        assert engine.info().policy_version == 1
        assert tokens_of(engine.generate(make_requests(4))) == before

    def test_base_of_another_model_is_refused(
        self, engine: GenerationEngine, adapters: list[Path], tmp_path: Path
    ) -> None:
        wide = save_tiny_model(tmp_path / "wide", hidden=96)
        with pytest.raises(EngineError, match="can't be loaded"):
            engine.load_weights(adapters[1], 9, "bad", base_at(wide))
        assert engine.info().policy_version == 1

    def test_engine_for_whole_weights_refuses_adapters(
        self, build: BuildAdapterEngine, base_dir: Path, adapters: list[Path]
    ) -> None:
        engine = build(base_dir, None)
        engine.load_weights(base_dir, 0, hash_at(base_dir))
        with pytest.raises(EngineError, match="started for whole weights"):
            engine.load_weights(adapters[0], 1, "first", base_at(base_dir))
        assert engine.info().policy_version == 0


def damaged_adapter(source: Path, base_dir: Path, target: Path, damage: str) -> Path:
    """Copy an adapter and break it in a named way."""
    if damage == "missing":
        return target
    if damage in ("rank", "targets"):
        changes = {"rank": 8} if damage == "rank" else {"target_modules": ("q_proj",)}
        spec = LORA.model_copy(update=changes)
        return save_adapter(target, base_dir, seed=1, spec=spec)
    shutil.copytree(source, target)
    weights, config = target / WEIGHTS_NAME, target / CONFIG_NAME
    if damage == "no_config":
        config.unlink()
    elif damage == "torn":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "alpha":
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 16}))
    else:
        deep = save_tiny_model(target.parent / "deep", layers=3)
        shutil.copy(save_adapter(target.parent / "other", deep, seed=2) / WEIGHTS_NAME, weights)
    return target
