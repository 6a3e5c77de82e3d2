"""Training of adapters on tiny models: what learns, what stays, and what a resume point brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")
pytest.importorskip("peft", reason="needs the extra transformers")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.engines.accelerate_engine import AccelerateEngine
from stages.engines.canary import canary_rows
from stages.engines.protocol import ScoredTokens
from stages.engines.transformers_engine import TransformersEngine
from stages.errors import ContractError, EngineError
from stages.spec.execution import LoraSpec
from tests.helpers.adapter_cases import LORA, base_at, hash_at, save_adapter
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.training_cases import training_engine, training_launch, training_request, training_rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ROWS = training_rows(8)
CANARY = canary_rows([row.prompt_token_ids for row in ROWS], vocab_size=16, max_completion_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), scale=1.0)


def adapter_engine(model_dir: Path, lora: LoraSpec = LORA, **options: Any) -> AccelerateEngine:
    return AccelerateEngine(training_launch(**options).model_copy(update={"lora": lora}), model_dir)


def largest(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def trained(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Versions 0, 1 and 2 of one engine without interruption."""
    folder = tmp_path_factory.mktemp("trained")
    engine = adapter_engine(model_dir)
    engine.load_checkpoint(model_dir, None, 0, hash_at(model_dir))
    scores = [engine.score(CANARY)]
    engine.save(folder / "policy-0", folder / "trainer-0", 0)
    for version in (1, 2):
        engine.train(training_request(training_rows(8, seed=version)))
        engine.save(folder / f"policy-{version}", folder / f"trainer-{version}", version)
        scores.append(engine.score(CANARY))
    engine.close()
    return {"folder": folder, "scores": scores}


def test_version_0_is_the_base_unchanged_and_its_adapters_do_nothing(trained: Any, model_dir: Path) -> None:
    assert hash_at(trained["folder"] / "policy-0") == hash_at(model_dir)
    plain = training_engine(model_dir)
    try:
        assert trained["scores"][0] == plain.score(CANARY)
    finally:
        plain.close()


def test_only_adapters_are_written_and_have_moments(trained: Any) -> None:
    folder = trained["folder"]
    assert {path.name for path in (folder / "policy-1").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json",
    }  # fmt: skip
    moments = {name.partition("/")[2] for name in load_file(folder / "trainer-1" / "optimizer.safetensors")}
    weights = set(load_file(folder / "trainer-1" / "weights.safetensors"))
    assert moments == weights
    assert len(weights) == 2 * 2 * 7  # A and B of seven layers in two blocks
    assert all(".lora_A." in name or ".lora_B." in name for name in weights)
    first, second = (load_file(folder / f"policy-{version}" / "adapter_model.safetensors") for version in (1, 2))
    assert all(not torch.equal(first[name], second[name]) for name in first)


def test_engines_and_peft_itself_compute_what_the_trainer_does(trained: Any) -> None:
    folder = trained["folder"]
    launch = training_launch().model_copy(update={"role": "generation", "name": "transformers", "lora": LORA})
    sampler = TransformersEngine(launch, folder / "policy-0")
    whole = AutoModelForCausalLM.from_pretrained(folder / "policy-0", dtype=torch.float32)
    for version in (1, 2):
        sampler.load_weights(folder / f"policy-{version}", version, "h", base_at(folder / "policy-0"))
        assert largest(sampler.score(CANARY), trained["scores"][version]) < 1e-4
    model = PeftModel.from_pretrained(whole, folder / "policy-2")
    assert largest([_scored(model, row) for row in CANARY], trained["scores"][2]) < 1e-4
    assert largest(trained["scores"][1], trained["scores"][2]) > 1e-3


def _scored(model: Any, row: ScoredTokens) -> list[float]:
    ids = [*row.prompt_token_ids, *row.completion_token_ids]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = len(row.prompt_token_ids) - 1
    return [float(logprobs[start + place, token]) for place, token in enumerate(row.completion_token_ids)]


def test_training_goes_on_bit_for_bit_from_a_resume_point(trained: Any, tmp_path: Path) -> None:
    folder = trained["folder"]
    engine = adapter_engine(folder / "policy-0")
    try:
        base = base_at(folder / "policy-0")
        engine.load_checkpoint(folder / "policy-1", folder / "trainer-1", 1, "h", base)
        assert engine.score(CANARY) == trained["scores"][1]
        engine.train(training_request(training_rows(8, seed=2)))
        engine.save(tmp_path / "policy", tmp_path / "trainer", 2)
    finally:
        engine.close()
    for name in ("policy/adapter_model.safetensors", "trainer/optimizer.safetensors", "trainer/weights.safetensors"):
        kind, _, file = name.partition("/")
        assert (tmp_path / name).read_bytes() == (folder / f"{kind}-2" / file).read_bytes()


def test_start_depends_on_the_seed_and_not_on_what_was_drawn_before(model_dir: Path, tmp_path: Path) -> None:
    starts = []
    for place, seed in enumerate((3, 3, 4)):
        torch.manual_seed(place)
        engine = adapter_engine(model_dir, seed=seed)
        engine.load_checkpoint(model_dir, None, 0, "h")
        engine.save(tmp_path / f"p{place}", tmp_path / f"t{place}", 0)
        engine.close()
        starts.append((tmp_path / f"t{place}" / "weights.safetensors").read_bytes())
    assert starts[0] == starts[1] != starts[2]


def test_two_ranks_train_as_one(trained: Any, model_dir: Path, tmp_path: Path) -> None:
    engine = adapter_engine(model_dir, num_processes=2)
    try:
        engine.load_checkpoint(model_dir, None, 0, "h")
        engine.train(training_request(training_rows(8, seed=1)))
        engine.save(tmp_path / "policy", tmp_path / "trainer", 1)
        assert largest(engine.score(CANARY), trained["scores"][1]) < 1e-4
    finally:
        engine.close()


def test_another_adapter_is_refused_before_weights_are_touched(trained: Any, tmp_path: Path) -> None:
    folder = trained["folder"]
    base = base_at(folder / "policy-0")
    engine = adapter_engine(folder / "policy-0")
    try:
        engine.load_checkpoint(folder / "policy-1", folder / "trainer-1", 1, "h", base)
        other = LORA.model_copy(update={"rank": 8})
        wide = save_adapter(tmp_path / "wide", folder / "policy-0", seed=1, spec=other)
        with pytest.raises(EngineError, match="r is 8 instead of 4"):
            engine.load_checkpoint(wide, None, 2, "h", base)
        assert engine.score(CANARY) == trained["scores"][1]
    finally:
        engine.close()
    wider = adapter_engine(folder / "policy-0", other)
    try:
        with pytest.raises(ContractError, match="saved from another model"):
            wider.load_checkpoint(wide, folder / "trainer-1", 1, "h", base)
    finally:
        wider.close()


def test_bf16_engine_agrees_within_the_tolerance_of_whole_weights(trained: Any, tmp_path: Path) -> None:
    """The mean gap that limits.canary_max_logprob_gap allows for bf16 on one side, and the base comes back exactly."""
    base_dir = trained["folder"] / "policy-0"
    large = save_adapter(tmp_path / "large", base_dir, seed=1, scale=0.1)
    launch = training_launch().model_copy(update={"role": "generation", "name": "transformers", "lora": LORA})
    scores = []
    for dtype in ("fp32", "bf16"):
        engine = TransformersEngine(launch.model_copy(update={"dtype": dtype}), base_dir)
        engine.load_weights(base_dir, 0, hash_at(base_dir))
        bare = engine.score(CANARY)
        engine.load_weights(large, 1, "h", base_at(base_dir))
        scores.append(engine.score(CANARY))
        engine.load_weights(base_dir, 0, hash_at(base_dir))
        assert engine.score(CANARY) == bare
        assert largest(scores[-1], bare) > 0.1
    gaps = [abs(a - b) for one, other in zip(*scores, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(gaps) / len(gaps) < 0.1
