"""What every generation engine must do, as one class of tests; each engine's module inherits it.

A subclass gives the fixture `build`, which makes an engine for a model directory. Names in brackets are rows of the
fault list that a test guards against.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.engines.launch import EngineLaunch
from stages.engines.protocol import Completion, GenerationEngine, GenerationRequest, ScoredTokens
from stages.errors import ContractError, EngineError
from tests.helpers.tiny_models import BOS_ID, EOS_ID, save_tiny_model

VOCABULARY = 16
TOLERANCE = 2e-4
"""Largest gap, in nats, between two fp32 computations of a log-prob."""
MAX_PROMPT_TOKENS = 320
MAX_COMPLETION_TOKENS = 16

BuildEngine = Callable[[Path], GenerationEngine]


def contract_launch(name: str, **changes: Any) -> EngineLaunch:
    fields: dict[str, Any] = {
        "role": "generation",
        "name": name,
        "run": "contract",
        "machine": "here",
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "max_completion_tokens": MAX_COMPLETION_TOKENS,
        "max_num_seqs": 64,
    }
    return EngineLaunch(**{**fields, **changes})


def make_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [BOS_ID, *(rng.randrange(4, VOCABULARY) for _ in range(length - 1))]


def make_requests(num: int, **changes: Any) -> list[GenerationRequest]:
    rng = random.Random(num)
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "stop_token_ids": [EOS_ID]}
    return [
        GenerationRequest(
            prompt_token_ids=make_prompt(index, rng.randrange(2, 40)), seed=rng.getrandbits(63), **{**fields, **changes}
        )
        for index in range(num)
    ]


def torch_logprobs(
    model_dir: Path, prompt: list[int], completion: list[int], temperature: float, top_p: float = 1.0, top_k: int = 0
) -> list[float]:
    """Recompute log-probs one token at a time in plain torch, with sets in place of masks."""
    model = _reference_model(model_dir)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    logprobs = []
    for offset, token in enumerate(completion):
        probs = torch.softmax(logits[len(prompt) - 1 + offset], dim=-1).tolist()
        ranked = sorted(range(len(probs)), key=lambda index: -probs[index])
        ranked = ranked[: top_k or len(ranked)]
        total = sum(probs[index] for index in ranked)
        kept, mass = [], 0.0
        for index in ranked:
            kept.append(index)
            mass += probs[index] / total
            if mass >= top_p:
                break
        assert token in kept
        logprobs.append(torch.tensor(probs[token] / sum(probs[index] for index in kept)).log().item())
    return logprobs


_MODELS: dict[Path, Any] = {}


def _reference_model(model_dir: Path) -> Any:
    if model_dir not in _MODELS:
        _MODELS[model_dir] = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return _MODELS[model_dir]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def largest_gap(left: list[list[float]], right: list[list[float]]) -> float:
    assert [len(line) for line in left] == [len(line) for line in right]
    return max(abs(a - b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


class EngineContract:
    """Tests of a generation engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("models")

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folder: Path) -> Path:
        return save_tiny_model(folder / "first", seed=1)

    @pytest.fixture(scope="class")
    @classmethod
    def other_dir(cls, folder: Path) -> Path:
        return save_tiny_model(folder / "second", seed=2)

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, build: BuildEngine, model_dir: Path) -> GenerationEngine:
        return build(model_dir)

    @pytest.fixture
    def engine(self, shared: GenerationEngine, model_dir: Path) -> GenerationEngine:
        shared.load_weights(model_dir, 0, "first")
        return shared

    def test_info_names_weights_and_mode(self, engine: GenerationEngine) -> None:
        info = engine.info()
        assert (info.policy_version, info.weights_hash, info.dtype, info.logprob_mode) == (
            0,
            "first",
            "fp32",
            "processed",
        )
        assert info.version

    def test_completions_hold_sampled_ids_and_one_logprob_each(self, engine: GenerationEngine) -> None:
        """[K1, O4] Only the chosen token's log-prob is returned, for ids and not for text."""
        requests = make_requests(40)
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            assert 1 <= len(completion.token_ids) <= request.max_tokens
            assert len(completion.logprobs) == len(completion.token_ids)
            assert all(0 <= token < VOCABULARY for token in completion.token_ids)
            assert all(logprob <= 0 for logprob in completion.logprobs)

    @pytest.mark.parametrize(
        ("temperature", "top_p", "top_k"),
        [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (0.7, 0.9, 0), (1.0, 1.0, 3), (0.7, 0.8, 5)],
    )
    def test_logprobs_are_of_the_distribution_sampled_from(
        self, engine: GenerationEngine, model_dir: Path, temperature: float, top_p: float, top_k: int
    ) -> None:
        """[L1, L2, L3, L6] Tempered logits, truncated and renormalised; not tempered log-probs, not the raw ones."""
        requests = make_requests(12, temperature=temperature, top_p=top_p, top_k=top_k)
        completions = engine.generate(requests)
        expected = [
            torch_logprobs(model_dir, list(request.prompt_token_ids), list(done.token_ids), temperature, top_p, top_k)
            for request, done in zip(requests, completions, strict=True)
        ]
        assert largest_gap([list(done.logprobs) for done in completions], expected) < TOLERANCE

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
    def test_scores_equal_tempered_logprobs_of_torch(
        self, engine: GenerationEngine, model_dir: Path, temperature: float
    ) -> None:
        """[L1, L6] Every row is scored at its own temperature."""
        rows = [
            ScoredTokens(
                prompt_token_ids=make_prompt(index, 3 + 7 * index),
                completion_token_ids=make_prompt(100 + index, 1 + index),
                temperature=temperature if index % 2 else 1.0,
            )
            for index in range(10)
        ]
        expected = [
            torch_logprobs(model_dir, list(row.prompt_token_ids), list(row.completion_token_ids), row.temperature)
            for row in rows
        ]
        assert largest_gap(engine.score(rows), expected) < TOLERANCE

    def test_tokens_sampled_before_count_towards_the_limit(self, engine: GenerationEngine) -> None:
        """[AReaL#858] The limit is of the completion, not of the call."""
        (request,) = make_requests(1, max_tokens=6, stop_token_ids=[])
        (done,) = engine.generate([replace(request, sampled_token_ids=[4, 5, 6, 7])])
        assert (len(done.token_ids), done.finish_reason) == (2, "length")
        with pytest.raises(ContractError, match="6 tokens are sampled already, but max_tokens is 6"):
            engine.generate([replace(request, sampled_token_ids=[4] * 6)])

    def test_completions_name_the_weights_that_sampled_them(self, engine: GenerationEngine, other_dir: Path) -> None:
        """[W11] The version comes from the weights, not from a lookup."""
        before = engine.generate(make_requests(2))
        engine.load_weights(other_dir, 7, "second")
        after = engine.generate(make_requests(2))
        assert {(done.policy_version, done.weights_hash) for done in before} == {(0, "first")}
        assert {(done.policy_version, done.weights_hash) for done in after} == {(7, "second")}

    def test_scores_of_own_samples_pass_the_canary(self, engine: GenerationEngine) -> None:
        """[L13] Sampling and scoring agree on the same weights."""
        requests = make_requests(20, temperature=0.7)
        completions = engine.generate(requests)
        rows = _as_scored(requests, completions)
        assert largest_gap(engine.score(rows), [list(done.logprobs) for done in completions]) < TOLERANCE

    def test_scores_of_other_weights_fail_the_canary(self, engine: GenerationEngine, other_dir: Path) -> None:
        """[W3, W5] A stale engine shows: other weights give other log-probs of the same tokens."""
        requests = make_requests(20)
        completions = engine.generate(requests)
        engine.load_weights(other_dir, 1, "second")
        rows = _as_scored(requests, completions)
        assert largest_gap(engine.score(rows), [list(done.logprobs) for done in completions]) > 0.1

    def test_score_of_no_completion_is_empty(self, engine: GenerationEngine) -> None:
        rows = [
            ScoredTokens(prompt_token_ids=make_prompt(0, 5), completion_token_ids=[]),
            ScoredTokens(prompt_token_ids=make_prompt(0, 5), completion_token_ids=[7, 8]),
        ]
        assert [len(line) for line in engine.score(rows)] == [0, 2]

    def test_empty_calls_give_empty_answers(self, engine: GenerationEngine) -> None:
        assert engine.generate([]) == []
        assert engine.score([]) == []

    def test_same_seed_gives_same_completion(self, engine: GenerationEngine) -> None:
        """[S5, S6] Seeds are always explicit and reach the sampler."""
        requests = make_requests(20)
        assert tokens_of(engine.generate(requests)) == tokens_of(engine.generate(requests))

    def test_different_seeds_give_different_completions(self, engine: GenerationEngine) -> None:
        """[S1, S3] Samples of one prompt differ."""
        prompt = make_prompt(5, 12)
        requests = [
            GenerationRequest(prompt_token_ids=prompt, seed=seed, max_tokens=12, temperature=1.0) for seed in range(16)
        ]
        assert len({tuple(tokens) for tokens in tokens_of(engine.generate(requests))}) >= 12

    def test_tokens_do_not_depend_on_the_batch(self, engine: GenerationEngine) -> None:
        """[S1] Alone, reversed, in shards: the same tokens in fp32."""
        requests = make_requests(48)
        whole = tokens_of(engine.generate(requests))
        reversed_batch = tokens_of(engine.generate(requests[::-1]))[::-1]
        shards = [
            tokens for start in range(0, 48, 7) for tokens in tokens_of(engine.generate(requests[start : start + 7]))
        ]
        alone = [tokens_of(engine.generate([request]))[0] for request in requests[:6]]
        assert engine.info().is_batch_invariant
        assert reversed_batch == whole
        assert shards == whole
        assert alone == whole[:6]

    def test_many_long_prompts_are_sampled_as_alone(self, engine: GenerationEngine) -> None:
        """[S5] More prompt tokens than an engine takes in one step: no prompt's draws are used up by a partial step."""
        requests = [
            GenerationRequest(prompt_token_ids=make_prompt(index, 300), seed=index, max_tokens=3, temperature=1.0)
            for index in range(30)
        ]
        alone = [tokens_of(engine.generate([request]))[0] for request in requests[12:18]]
        assert tokens_of(engine.generate(requests))[12:18] == alone

    def test_finish_reason_tells_end_from_limit(self, engine: GenerationEngine) -> None:
        """[M5] `stop` exactly when the last id is an end token; the end token is part of the completion."""
        completions = engine.generate(make_requests(60, max_tokens=16))
        reasons = {done.finish_reason for done in completions}
        for done in completions:
            assert (done.finish_reason == "stop") == (done.token_ids[-1] == EOS_ID)
            assert EOS_ID not in list(done.token_ids)[:-1]
            assert done.finish_reason == "stop" or len(done.token_ids) == 16
        assert reasons == {"stop", "length"}

    def test_every_declared_end_id_stops(self, engine: GenerationEngine) -> None:
        """[M4] Models with several end ids."""
        stops = [EOS_ID, 6, 11]
        completions = engine.generate(make_requests(60, max_tokens=16, stop_token_ids=stops))
        assert {done.token_ids[-1] for done in completions if done.finish_reason == "stop"} == set(stops)
        assert all(not set(list(done.token_ids)[:-1]) & set(stops) for done in completions)

    def test_without_end_ids_completions_run_to_the_limit(self, engine: GenerationEngine) -> None:
        """Not even the model's own end token stops a completion that didn't ask for it."""
        completions = engine.generate(make_requests(60, max_tokens=16, stop_token_ids=()))
        assert {(done.finish_reason, len(done.token_ids)) for done in completions} == {("length", 16)}
        assert any(EOS_ID in done.token_ids for done in completions)

    def test_temperature_zero_is_greedy(self, engine: GenerationEngine, model_dir: Path) -> None:
        request = GenerationRequest(prompt_token_ids=make_prompt(3, 9), seed=1, max_tokens=6, temperature=0.0)
        (done,) = engine.generate([request])
        ids = list(request.prompt_token_ids)
        with torch.inference_mode():
            for _ in range(6):
                ids.append(int(_reference_model(model_dir)(torch.tensor([ids])).logits[0, -1].argmax()))
        assert list(done.token_ids) == ids[9:]

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_update_in_place_equals_a_fresh_engine(self, build: BuildEngine, folder: Path, tied: bool) -> None:
        """[W3, W5, L8, L9, L10] Nothing of the old version survives: no packed copy, no tied head, no cached prefix."""
        old = save_tiny_model(folder / f"old-{tied}", seed=3, tied=tied)
        new = save_tiny_model(folder / f"new-{tied}", seed=4, tied=tied)
        requests = [
            GenerationRequest(prompt_token_ids=make_prompt(length, length), seed=length, max_tokens=8, temperature=1.0)
            for length in (20, 150, 300)
        ]
        engine = build(old)
        engine.load_weights(old, 0, "old")
        before = engine.generate(requests)
        engine.load_weights(new, 1, "new")
        after = engine.generate(requests)
        assert engine.info().policy_version == 1
        expected = [
            torch_logprobs(new, list(request.prompt_token_ids), list(done.token_ids), 1.0)
            for request, done in zip(requests, after, strict=True)
        ]
        assert largest_gap([list(done.logprobs) for done in after], expected) < TOLERANCE
        engine.load_weights(old, 2, "old")
        assert tokens_of(engine.generate(requests)) == tokens_of(before)
        fresh = build(new)
        fresh.load_weights(new, 1, "new")
        assert tokens_of(fresh.generate(requests)) == tokens_of(after)

    @pytest.mark.parametrize("damage", ["missing", "no_config", "no_weights", "truncated", "garbage", "shape", "names"])
    def test_unfit_directory_is_refused_and_the_engine_goes_on(
        self, engine: GenerationEngine, other_dir: Path, folder: Path, tmp_path: Path, damage: str
    ) -> None:
        bad = damaged_directory(other_dir, tmp_path / "bad", damage)
        before = tokens_of(engine.generate(make_requests(8)))
        with pytest.raises(EngineError, match="can't be loaded"):
            engine.load_weights(bad, 9, "bad")
        assert engine.info().policy_version == 0
        assert tokens_of(engine.generate(make_requests(8))) == before

    def test_engine_without_weights_refuses_to_work(self, build: BuildEngine, model_dir: Path) -> None:
        """Rollouts always have a policy version."""
        engine = build(model_dir)
        assert engine.info().policy_version is None
        with pytest.raises(EngineError, match="call load_weights first"):
            engine.generate(make_requests(1))
        with pytest.raises(EngineError, match="call load_weights first"):
            engine.score(
                _as_scored(
                    make_requests(1),
                    [
                        Completion(
                            token_ids=[4], logprobs=[0.0], finish_reason="stop", policy_version=0, weights_hash=""
                        )
                    ],
                )
            )

    def test_bad_requests_are_refused_with_every_fault(self, engine: GenerationEngine) -> None:
        good = make_requests(1)[0]
        bad = [
            replace(good, prompt_token_ids=[]),
            replace(good, prompt_token_ids=[VOCABULARY]),
            replace(good, prompt_token_ids=[5] * (MAX_PROMPT_TOKENS + 1)),
            replace(good, max_tokens=0, seed=-1),
            good,
        ]
        with pytest.raises(ContractError) as caught:
            engine.generate(bad)
        faults = caught.value.attributes["faults"]
        assert [fault.split(":")[0] for fault in faults] == [
            "request 0",
            "request 1",
            "request 2",
            "request 3",
            "request 3",
        ]


def damaged_directory(source: Path, target: Path, damage: str) -> Path:
    """Copy a model directory and break it in a named way."""
    if damage == "missing":
        return target
    shutil.copytree(source, target)
    weights = target / "model.safetensors"
    if damage == "no_config":
        (target / "config.json").unlink()
    elif damage == "no_weights":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "garbage":
        weights.write_bytes(b"\x00" * 4096)
    elif damage == "shape":
        shutil.copy(save_tiny_model(target.parent / "wide", hidden=96) / "model.safetensors", weights)
    else:
        shutil.copy(save_tiny_model(target.parent / "deep", layers=3) / "model.safetensors", weights)
    return target


def _as_scored(requests: list[GenerationRequest], completions: list[Completion]) -> list[ScoredTokens]:
    return [
        ScoredTokens(
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=done.token_ids,
            temperature=request.temperature,
        )
        for request, done in zip(requests, completions, strict=True)
    ]
