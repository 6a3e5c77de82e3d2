from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")


from plans.spec.llm import LlmShape
from stages.errors import DataError, SpecFaultsError
from stages.models.shape import check_shape, describe
from tests.helpers.tiny_models import save_tiny_model

pytestmark = pytest.mark.engines

TINY = LlmShape(layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocab=16, tied=True)


def change_config(directory, **changes):
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_describe_reads_every_number(tmp_path):
    assert describe(save_tiny_model(tmp_path)) == TINY


def test_describe_untied_model_without_a_word_in_the_config_looks_at_the_weights(tmp_path):
    directory = save_tiny_model(tmp_path, tied=False)
    change_config(directory, tie_word_embeddings=None)
    assert describe(directory) == TINY.model_copy(update={"tied": False})


def test_describe_fills_in_the_defaults_of_old_configs(tmp_path):
    directory = save_tiny_model(tmp_path)
    change_config(directory, head_dim=None, num_key_value_heads=None)
    assert describe(directory) == TINY.model_copy(update={"kv_heads": 2})


def test_describe_names_missing_numbers_and_experts_together(tmp_path):
    directory = save_tiny_model(tmp_path)
    change_config(directory, hidden_size=None, num_experts=8)
    with pytest.raises(SpecFaultsError) as caught:
        describe(directory)
    assert [fault.split(" ")[0] for fault in caught.value.faults] == ["hidden_size", "num_experts"]


def test_describe_without_config_says_what_to_give(tmp_path):
    with pytest.raises(DataError, match="give a complete model directory"):
        describe(tmp_path)


def test_check_shape_names_both_numbers_of_every_difference(tmp_path):
    directory = save_tiny_model(tmp_path)
    wanted = TINY.model_copy(update={"layers": 4, "vocab": 81})
    with pytest.raises(SpecFaultsError) as caught:
        check_shape(directory, wanted, "actor")
    assert caught.value.faults == [
        f"models.actor.shape.layers is 4, but the model in {directory} has 2",
        f"models.actor.shape.vocab is 81, but the model in {directory} has 16",
    ]
