"""What the contract doesn't reach: failures half-way, options, and bits under every batch composition."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")
from safetensors.torch import load_file, save_file

from stages.engines import transformers_engine
from stages.engines.launch import EngineLaunch
from stages.engines.protocol import Completion, GenerationRequest, ScoredTokens
from stages.engines.transformers_engine import TransformersEngine
from stages.errors import EngineError, NumericsError
from tests.helpers.tiny_models import EOS_ID, save_tiny_model

pytestmark = pytest.mark.engines


def make_launch(**changes: object) -> EngineLaunch:
    fields = {"role": "generation", "name": "transformers", "run": "r", "machine": "m"}
    return EngineLaunch.model_validate(
        {**fields, "max_prompt_tokens": 40, "max_completion_tokens": 12, "max_num_seqs": 300, **changes}
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


def make_requests(num: int) -> list[GenerationRequest]:
    rng = random.Random(0)
    prompts = [[1, *(rng.randrange(4, 16) for _ in range(rng.randrange(1, 39)))] for _ in range(num // 4)]
    return [
        GenerationRequest(
            prompt_token_ids=rng.choice(prompts),
            seed=rng.getrandbits(64),
            max_tokens=rng.randrange(1, 13),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 5]),
            stop_token_ids=[EOS_ID, 9],
        )
        for _ in range(num)
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tokens_and_logprobs_are_equal_bit_by_bit_for_every_batch(model_dir: Path, dtype: str) -> None:
    engine = TransformersEngine(make_launch(dtype=dtype, options={"tile_rows": 32}), model_dir)
    engine.load_weights(model_dir, 0, "h")
    requests = make_requests(800)
    whole = engine.generate(requests)
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    shuffled = engine.generate([requests[index] for index in order])
    shards = [done for start in range(0, 600, 47) for done in engine.generate(requests[start : min(start + 47, 600)])]
    assert [whole[index] for index in order] == shuffled
    assert whole[:600] == shards
    assert whole[7:9] == [engine.generate([requests[index]])[0] for index in (7, 8)]


def test_default_tiles_of_a_larger_model_give_equal_bits_for_every_batch(tmp_path: Path) -> None:
    model_dir = save_tiny_model(tmp_path / "model", hidden=320, seed=1)
    engine = TransformersEngine(make_launch(), model_dir)
    engine.load_weights(model_dir, 0, "h")
    requests = make_requests(90)
    whole = engine.generate(requests)
    shards = [done for start in range(0, 90, 7) for done in engine.generate(requests[start : start + 7])]
    assert whole == shards
    assert whole[3:5] == [engine.generate([requests[index]])[0] for index in (3, 4)]


def test_wave_size_has_no_influence(model_dir: Path) -> None:
    requests = make_requests(300)
    completions = []
    for max_num_seqs in (16, 300):
        engine = TransformersEngine(make_launch(max_num_seqs=max_num_seqs, options={"tile_rows": 16}), model_dir)
        engine.load_weights(model_dir, 0, "h")
        completions.append(engine.generate(requests))
    assert completions[0] == completions[1]


def test_load_that_fails_half_way_makes_the_engine_unusable(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(make_launch(), model_dir)
    engine.load_weights(model_dir, 0, "h")

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(transformers_engine, "safe_open", fail)
    with pytest.raises(OSError, match="the disk went away"):
        engine.load_weights(model_dir, 1, "i")
    with pytest.raises(EngineError, match="version 1 failed half-way"):
        engine.generate(make_requests(4))
    assert engine.info().policy_version is None


def test_tied_head_that_differs_from_the_embedding_is_refused(model_dir: Path, tmp_path: Path) -> None:
    engine = TransformersEngine(make_launch(), model_dir)
    twins = shutil.copytree(model_dir, tmp_path / "twins")
    tensors = load_file(model_dir / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, twins / "model.safetensors", metadata={"format": "pt"})
    engine.load_weights(twins, 0, "equal")
    save_file({**tensors, "lm_head.weight": head + 1}, twins / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lm_head.weight and model.embed_tokens.weight differ"):
        engine.load_weights(twins, 1, "unequal")
    assert engine.info().policy_version == 0


def test_other_rotation_base_is_another_architecture(model_dir: Path, tmp_path: Path) -> None:
    """Equal shapes, other arithmetic: only config.json tells."""
    engine = TransformersEngine(make_launch(), model_dir)
    other = shutil.copytree(model_dir, tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))
    with pytest.raises(EngineError, match=r"another architecture: rms_norm_eps is 0.5 instead of 1e-06"):
        engine.load_weights(other, 0, "h")


def test_weights_that_are_not_finite_raise_instead_of_sampling(model_dir: Path, tmp_path: Path) -> None:
    engine = TransformersEngine(make_launch(), model_dir)
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    engine.load_weights(broken, 0, "h")
    with pytest.raises(NumericsError, match="logits are not finite"):
        engine.generate(make_requests(4))


def test_lengths_beyond_the_model_are_refused(model_dir: Path) -> None:
    with pytest.raises(EngineError, match="700 tokens together, the model has 512 positions"):
        TransformersEngine(make_launch(max_prompt_tokens=600, max_completion_tokens=100), model_dir)


@pytest.mark.parametrize("options", [{"tile_rows": 0}, {"tile_rows": "8"}, {"flash": True}])
def test_unknown_or_wrong_options_are_refused(model_dir: Path, options: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="knows only `tile_rows`"):
        TransformersEngine(make_launch(options=options), model_dir)


def test_closed_engine_refuses_to_work(model_dir: Path) -> None:
    engine = TransformersEngine(make_launch(), model_dir)
    engine.load_weights(model_dir, 0, "h")
    engine.close()
    with pytest.raises(EngineError, match="it was closed"):
        engine.generate(make_requests(4))


def test_interruption_keeps_what_was_sampled_and_the_rest_comes_from_the_new_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    """Each part's log-probs are those of the weights that it names."""
    other_dir = save_tiny_model(tmp_path / "other", seed=2)
    engine = TransformersEngine(make_launch(), model_dir)
    engine.load_weights(model_dir, 3, "old")
    requests = [
        GenerationRequest(prompt_token_ids=[1, 5, 6, 7], seed=seed, max_tokens=10, temperature=1.0)
        for seed in range(20)
    ]
    looks = iter(range(100))
    engine.is_interrupted = lambda: next(looks) >= 4  # one look before the wave, then one at each decode step
    first = engine.generate(requests)
    assert {(len(part.token_ids), part.finish_reason, part.policy_version) for part in first} == {(4, "interrupted", 3)}

    engine.is_interrupted = lambda: True
    nothing = engine.generate(requests)
    assert {(len(part.token_ids), part.finish_reason) for part in nothing} == {(0, "interrupted")}

    engine.is_interrupted = lambda: False
    old_scores = engine.score(_scored(requests, first))
    engine.load_weights(other_dir, 4, "new")
    asked = [replace(r, sampled_token_ids=part.token_ids) for r, part in zip(requests, first, strict=True)]
    second = engine.generate(asked)
    assert {(len(part.token_ids), part.policy_version, part.weights_hash) for part in second} == {(6, 4, "new")}
    new_scores = engine.score(_scored(requests, first, second))
    for before, after, old, new in zip(first, second, old_scores, new_scores, strict=True):
        assert old == pytest.approx(list(before.logprobs), abs=2e-4)
        assert new[4:] == pytest.approx(list(after.logprobs), abs=2e-4)
    pairs = [pair for old, new in zip(old_scores, new_scores, strict=True) for pair in zip(old, new[:4], strict=True)]
    assert max(abs(old - new) for old, new in pairs) > 0.01


def _scored(requests: list[GenerationRequest], *parts: Sequence[Completion]) -> list[ScoredTokens]:
    return [
        ScoredTokens(
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=[token for part in of_row for token in part.token_ids],
        )
        for request, *of_row in zip(requests, *parts, strict=True)
    ]
