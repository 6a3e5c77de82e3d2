from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")


from stages.engines.training.request_checks import check_rows, check_training_request
from stages.errors import ContractError
from stages.rl.spec import GrpoSpec
from tests.helpers.training_cases import training_request, training_rows

pytestmark = pytest.mark.engines

LIMITS = {"vocab_size": 16, "max_sequence_tokens": 40}


def test_check_training_request_accepts_good_rows():
    assert check_training_request(training_request(training_rows(4)), **LIMITS) is None


def test_check_training_request_reports_all_faults_together():
    rows = training_rows(4)
    rows[0] = replace(rows[0], completion_token_ids=[99], sampler_logprobs=[-1.0])
    rows[1] = replace(rows[1], sampler_logprobs=[])
    rows[2] = replace(rows[2], prompt_token_ids=[1] * 100)
    rows[3] = replace(rows[3], temperature=0.0)
    request = training_request(rows, mini_batches=[[0, 1], [], [7], [2, 2]], grpo=GrpoSpec(kl={"weight": 0.1}))
    with pytest.raises(ContractError) as caught:
        check_training_request(request, **LIMITS)
    faults = " ".join(caught.value.attributes["faults"])
    for expected in ("mini_batches[1]", "mini_batches[2]", "mini_batches[3] names a row twice", "row-0 has token ids",
                     "row-1 has 0 sampler_logprobs", "row-2 has", "row-3 has temperature 0.0",
                     "row-0 has no reference_logprobs"):  # fmt: skip
        assert expected in faults


def test_check_training_request_without_optimizer_steps_is_refused():
    with pytest.raises(ContractError, match="mini_batches is empty"):
        check_training_request(training_request(training_rows(2), mini_batches=[]), **LIMITS)


def test_check_training_request_constant_length_loss_needs_the_length():
    request = training_request(training_rows(2), grpo=GrpoSpec(loss="dr_grpo"), max_response_tokens=None)
    with pytest.raises(ContractError, match="max_response_tokens, which is missing"):
        check_training_request(request, **LIMITS)


def test_check_rows_empty_completion_is_refused():
    row = replace(training_rows(1)[0], completion_token_ids=[], sampler_logprobs=[])
    with pytest.raises(ContractError, match="row-0 needs at least one prompt token"):
        check_rows([row], **LIMITS)
