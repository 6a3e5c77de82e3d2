"""Messages survive the way to another process unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.engines.protocol import (
    AdapterBase,
    Completion,
    GenerationRequest,
    OptimizerStepMetrics,
    TrainingOutcome,
    TrainingRequest,
    TrainingRow,
)
from stages.engines.wire import decode_error, encode_error, methods_of
from stages.errors import ContractError, EngineError, NumericsError, SpecFaultsError, StageError
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from stages.spec.execution import OptimizerSpec


def test_roles_offer_the_methods_of_their_protocol() -> None:
    assert sorted(methods_of("generation")) == ["generate", "info", "load_weights", "score"]
    assert sorted(methods_of("scoring")) == ["info", "load_weights", "score"]
    assert sorted(methods_of("training")) == ["info", "load_checkpoint", "load_weights", "save", "score", "train"]


def test_base_of_an_adapter_survives_the_way_and_may_be_absent() -> None:
    base = AdapterBase(directory=Path("/base"), weights_hash="h")
    whole = {"directory": Path("/policy"), "policy_version": 1, "weights_hash": "w"}
    for role in ("generation", "scoring", "training"):
        codec = methods_of(role)["load_weights"]
        assert codec.decode_arguments(codec.encode_arguments({**whole, "base": base})) == {**whole, "base": base}
        assert codec.decode_arguments(codec.encode_arguments(whole)) == {**whole, "base": None}
    reward = methods_of("reward")["load_weights"]
    with pytest.raises(ContractError, match="unknown field `base`"):
        reward.decode_arguments(reward.encode_arguments({**whole, "base": base}))


def test_training_request_survives_the_way() -> None:
    row = TrainingRow(
        row_id="a",
        prompt_token_ids=[1, 2],
        completion_token_ids=[3],
        advantage=-0.1,
        sampler_logprobs=[-1.2345678901234567],
        temperature=0.7,
    )
    request = TrainingRequest(
        rows=[row],
        mini_batches=[[0], [0]],
        grpo=GrpoSpec(loss="dapo"),
        correction=CorrectionSpec(cap=3.0),
        optimizer=OptimizerSpec(learning_rate=1e-5),
        total_optimizer_steps=10,
        micro_batch_tokens=64,
        max_non_finite_steps=3,
    )
    codec = methods_of("training")["train"]
    assert codec.decode_arguments(codec.encode_arguments({"request": request})) == {"request": request}


def test_training_outcome_with_values_that_are_not_finite_survives_the_way() -> None:
    step = OptimizerStepMetrics(
        optimizer_step=3, is_skipped=True, num_rows=1, num_tokens=2, values={"loss": float("inf")}
    )
    outcome = TrainingOutcome(steps=[step], trainer_logprobs=[[-0.5]], skipped_row_ids=["a"])
    codec = methods_of("training")["train"]
    assert codec.decode_result(codec.encode_result(outcome)) == outcome


def test_completions_survive_bit_by_bit() -> None:
    done = [
        Completion(token_ids=[4, 2], logprobs=[-0.1, -1e-300], finish_reason="stop", policy_version=3, weights_hash="h")
    ]
    codec = methods_of("generation")["generate"]
    assert codec.decode_result(codec.encode_result(done)) == done


def test_paths_and_nothing_survive_the_way() -> None:
    arguments = {"policy_dir": Path("/a"), "trainer_dir": None, "policy_version": 1, "weights_hash": "h"}
    codec = methods_of("training")["load_checkpoint"]
    assert codec.decode_arguments(codec.encode_arguments(arguments)) == {**arguments, "base": None}


def test_numpy_columns_are_taken_as_token_ids() -> None:
    request = GenerationRequest(prompt_token_ids=np.array([1, 2]), seed=2**64 - 1, max_tokens=1, temperature=1.0)
    codec = methods_of("generation")["generate"]
    (decoded,) = codec.decode_arguments(codec.encode_arguments({"requests": [request]}))["requests"]
    assert (decoded.prompt_token_ids, decoded.seed) == ([1, 2], 2**64 - 1)


def test_arguments_of_another_shape_are_refused() -> None:
    codec = methods_of("generation")["load_weights"]
    with pytest.raises(ContractError, match="'load_weights' don't fit its signature"):
        codec.decode_arguments(codec.encode_arguments({"directory": "/a"}))
    with pytest.raises(ContractError, match="result of engine method 'load_weights'"):
        codec.decode_result(b"\xff")


@pytest.mark.parametrize(
    "error",
    [
        EngineError("rank 1 failed", rank=1, cause="OutOfMemoryError"),
        NumericsError("loss is nan", dump="/tmp/rows.json"),
        SpecFaultsError("job.yaml", ["a", "b"]),
        StageError("plain"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_class_message_and_attributes(error: StageError) -> None:
    back = decode_error(encode_error(error))
    assert (type(back), str(back), dict(back.attributes)) == (type(error), str(error), dict(error.attributes))


def test_attributes_that_json_does_not_know_become_text() -> None:
    back = decode_error(encode_error(EngineError("x", path=Path("/a"))))
    assert back.attributes == {"path": "/a"}


def test_body_that_is_no_error_is_a_contract_error() -> None:
    with pytest.raises(ContractError, match="not an engine error"):
        decode_error(b"<html>")
