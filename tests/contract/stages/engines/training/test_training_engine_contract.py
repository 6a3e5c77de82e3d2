"""A training engine as stages meet it: a process of its own, reached through the manager and the wire."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")


from stages.engines.canary import CanaryRecord, canary_rows, check_canary
from stages.engines.manager import EngineManager
from stages.engines.transformers_engine import TransformersEngine
from stages.errors import ContractError, NumericsError
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.training_cases import training_launch, training_request, training_rows

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), scale=1.0)


@pytest.fixture(
    scope="module",
    params=[
        ("accelerate", {"num_processes": 1}),
        ("accelerate", {"num_processes": 2}),
        ("accelerate", {"num_processes": 2, "sharding": "full"}),
        ("megatron", {"stage_layers": [1, 1]}),
    ],
    ids=["accelerate, one rank", "accelerate, two ranks", "accelerate, spread weights", "megatron, two stages"],
)
def engine(request, model_dir, tmp_path_factory):
    name, options = request.param
    if name == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("needs the extra megatron")
    manager = EngineManager(tmp_path_factory.mktemp("state"))
    launch = training_launch(**options).model_copy(update={"name": name})
    remote = manager.acquire(launch, model_dir, timeout_s=1200)
    yield remote
    remote.close()
    assert manager.stop_all() == 1


def test_training_engine_trains_saves_and_passes_the_canary_of_a_generation_engine(engine, model_dir, tmp_path):
    engine.load_checkpoint(model_dir, None, 0, "hash-0")
    assert (engine.info().name, engine.info().policy_version) == (engine.record.launch.name, 0)
    rows = training_rows(6)
    outcome = engine.train(training_request(rows))
    assert [step.optimizer_step for step in outcome.steps] == [0, 1]
    assert [len(values) for values in outcome.trainer_logprobs] == [len(row.completion_token_ids) for row in rows]
    assert engine.info().policy_version is None
    engine.save(tmp_path / "policy", tmp_path / "trainer", 1)
    assert engine.info().policy_version == 1
    canary = canary_rows([row.prompt_token_ids for row in rows], vocab_size=16, max_completion_tokens=8)
    record = CanaryRecord(rows=canary, trainer_logprobs=engine.score(canary))
    record = CanaryRecord.from_json(json.loads(json.dumps(record.to_json())))
    launch = training_launch().model_copy(update={"role": "generation", "name": "transformers"})
    sampler = TransformersEngine(launch, tmp_path / "policy")
    sampler.load_weights(tmp_path / "policy", 1, "hash-1")
    assert check_canary(record, sampler.score(canary), max_gap=1e-4, engine="transformers").num_tokens == 32


def test_training_engine_numerics_error_carries_the_row_ids(engine, model_dir):
    engine.load_checkpoint(model_dir, None, 0, "hash-0")
    rows = [replace(row, advantage=1e38) for row in training_rows(4)]
    rows = [replace(row, sampler_logprobs=[-30.0] * len(row.sampler_logprobs)) for row in rows]
    rows = [replace(row, temperature=0.01) for row in rows]
    with pytest.raises(NumericsError, match="in a row") as caught:
        engine.train(training_request(rows, max_non_finite_steps=1))
    assert caught.value.attributes["row_ids"] == ["row-0", "row-1"]


def test_training_engine_bad_request_lists_faults_and_goes_on(engine, model_dir):
    engine.load_checkpoint(model_dir, None, 0, "hash-0")
    with pytest.raises(ContractError, match="mini_batches is empty"):
        engine.train(training_request(training_rows(2), mini_batches=[]))
    assert len(engine.train(training_request(training_rows(2))).steps) == 2
