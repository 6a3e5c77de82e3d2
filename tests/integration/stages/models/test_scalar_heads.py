"""Critics from backbones, and what is refused of critics and reward models before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the engines' environment")

from safetensors.torch import load_file, save_file  # noqa: E402 - torch checked first
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification  # noqa: E402

from stages.engines.launch import EngineLaunch  # noqa: E402
from stages.engines.protocol import ScoredTokens  # noqa: E402
from stages.engines.reward_engine import TransformersRewardEngine  # noqa: E402
from stages.errors import SpecFaultsError  # noqa: E402
from stages.models.scalar_heads import head_faults, write_first_critic  # noqa: E402
from tests.helpers.critic_cases import TINY_SHAPE  # noqa: E402
from tests.helpers.tiny_models import save_tiny_model, save_tokenizer  # noqa: E402

pytestmark = pytest.mark.engines


def save_reward_model(directory: Path, *, labels: int = 1, alphabet: str = "0123456789+=") -> Path:
    directory.mkdir()
    save_tokenizer(directory, alphabet)
    config = Qwen3Config(
        vocab_size=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=128, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, num_labels=labels,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.fixture
def actor(tmp_path) -> Path:
    return save_tiny_model(tmp_path / "actor")


@pytest.fixture
def tokenizer(actor):
    return AutoTokenizer.from_pretrained(actor)


def rewrite(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_critic_of_a_causal_model_has_its_backbone_and_says_zero(actor, tmp_path):
    facts = write_first_critic(actor, TINY_SHAPE, tmp_path / "critic")
    ours, theirs = load_file(tmp_path / "critic" / "model.safetensors"), load_file(actor / "model.safetensors")
    assert facts["has_fresh_head"] is True
    assert ours.pop("score.weight").abs().sum() == 0.0
    assert ours.pop("score.bias").tolist() == [0.0]
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_critic_of_a_reward_model_keeps_its_head(tmp_path):
    reward = save_reward_model(tmp_path / "reward")
    facts = write_first_critic(reward, TINY_SHAPE, tmp_path / "critic")
    ours, theirs = load_file(tmp_path / "critic" / "model.safetensors"), load_file(reward / "model.safetensors")
    assert facts["has_fresh_head"] is False
    assert torch.equal(ours["score.weight"], theirs["score.weight"])


def test_fitting_models_have_no_fault(actor, tokenizer, tmp_path):
    assert head_faults(actor, "critic", TINY_SHAPE, tokenizer) == []
    assert head_faults(save_reward_model(tmp_path / "reward"), "reward", TINY_SHAPE, tokenizer) == []


def test_other_tokenizer_is_named_token_by_token(actor, tokenizer, tmp_path):
    reward = save_reward_model(tmp_path / "reward", alphabet="1023456789+=")
    (fault,) = head_faults(reward, "reward", TINY_SHAPE, tokenizer)
    assert (
        "has another tokenizer than the actor: 2 tokens differ ('0' is 5 instead of 4, '1' is 4 instead of 5)" in fault
    )


def test_missing_and_extra_tensors_are_named(actor, tokenizer):
    def damage(tensors):
        tensors["model.layers.9.extra"] = torch.zeros(1)
        del tensors["model.layers.1.mlp.up_proj.weight"]

    rewrite(actor, damage)
    faults = head_faults(actor, "critic", TINY_SHAPE, tokenizer)
    assert any("missing tensors: model.layers.1.mlp.up_proj.weight" in fault for fault in faults)
    assert any("unknown tensors: model.layers.9.extra" in fault for fault in faults)
    with pytest.raises(SpecFaultsError, match="missing tensors"):
        write_first_critic(actor, TINY_SHAPE, actor.parent / "critic")


def test_causal_model_is_no_reward_model(actor, tokenizer):
    faults = head_faults(actor, "reward", TINY_SHAPE, tokenizer)
    assert any("missing tensors: score.weight; give a sequence classifier" in fault for fault in faults)


def test_classifier_of_two_labels_is_refused(tokenizer, tmp_path):
    reward = save_reward_model(tmp_path / "reward", labels=2)
    (fault,) = head_faults(reward, "reward", TINY_SHAPE, tokenizer)
    assert "other shapes: score.weight (2, 64) instead of (1, 64)" in fault


def test_other_shape_is_named(actor, tokenizer):
    faults = head_faults(actor, "critic", TINY_SHAPE.model_copy(update={"layers": 3}), tokenizer)
    assert any("models.critic.shape.layers is 3, but the model in" in fault for fault in faults)


def test_directory_without_a_model_is_named(tokenizer, tmp_path):
    (fault,) = head_faults(tmp_path / "nothing", "reward", TINY_SHAPE, tokenizer)
    assert "has no config.json" in fault


def test_reward_engine_scores_the_last_token_whatever_stands_beside(tmp_path):
    directory = save_reward_model(tmp_path / "reward")
    launch = EngineLaunch(
        role="reward", name="transformers", run="test", machine="here", max_prompt_tokens=32, max_completion_tokens=32
    )
    engine = TransformersRewardEngine(launch, directory)
    engine.load_weights(directory, 0, "hash")
    rows = [
        ScoredTokens(prompt_token_ids=[1, 5, 7], completion_token_ids=[4, 2]),
        ScoredTokens(prompt_token_ids=[1, 9], completion_token_ids=[2]),
        ScoredTokens(prompt_token_ids=[1, 5, 7, 8, 6], completion_token_ids=[10, 11, 12, 2]),
    ]
    found = engine.rewards(rows)
    model = Qwen3ForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    for row, score in zip(rows, found, strict=True):
        ids = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])
        with torch.no_grad():
            expected = float(model(input_ids=ids).logits[0, 0])
        assert score == pytest.approx(expected, abs=1e-5)
    assert engine.rewards(rows[:1]) == pytest.approx(found[:1], abs=1e-6)
    engine.close()
