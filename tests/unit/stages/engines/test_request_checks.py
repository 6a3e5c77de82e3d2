"""Requests that no engine may answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stages.engines.launch import EngineLaunch
from stages.engines.protocol import GenerationRequest, ScoredTokens
from stages.engines.request_checks import check_generation, check_scoring
from stages.errors import ContractError

LAUNCH = EngineLaunch(
    role="generation", name="transformers", run="r", machine="m", max_prompt_tokens=4, max_completion_tokens=3
)
GOOD = GenerationRequest(prompt_token_ids=[1, 2], seed=2**64 - 1, max_tokens=3, temperature=0.0)
ROW = ScoredTokens(prompt_token_ids=[1], completion_token_ids=[])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"prompt_token_ids": []}, "the prompt has 0 tokens, must have 1 to 4"),
        ({"prompt_token_ids": [1] * 5}, "the prompt has 5 tokens, must have 1 to 4"),
        ({"prompt_token_ids": [-1, 16]}, "the prompt has ids from -1 to 16, must be in [0, 16)"),
        ({"max_tokens": 4}, "max_tokens is 4, must be 1 to 3"),
        ({"seed": 2**64}, f"seed is {2**64}, must be 0 to 2^64 - 1"),
        ({"temperature": float("nan")}, "temperature is nan, must be finite and not negative"),
        ({"top_p": 0.0}, "top_p is 0.0, must be in (0, 1]"),
        ({"top_k": -1}, "top_k is -1, must be 0 (all) or more"),
    ],
)
def test_bad_generation_request_is_refused(change: dict[str, object], fault: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_generation([GOOD, replace(GOOD, **change)], LAUNCH, 16)
    assert caught.value.attributes["faults"] == [f"request 1: {fault}"]


def test_bad_scored_row_is_refused() -> None:
    with pytest.raises(ContractError) as caught:
        check_scoring([ROW, replace(ROW, completion_token_ids=[1] * 4, temperature=0.0)], LAUNCH, 16)
    assert caught.value.attributes["faults"] == [
        "row 1: the completion has 4 tokens, must have 0 to 3",
        "row 1: temperature is 0.0, must be finite and above 0",
    ]


def test_message_lists_a_few_faults_and_counts_the_rest() -> None:
    with pytest.raises(ContractError, match=r"12 fault\(s\) in 12 rows(?s:.*)and 7 more"):
        check_generation([replace(GOOD, seed=-1)] * 12, LAUNCH, 16)


def test_good_requests_pass() -> None:
    check_generation([GOOD], LAUNCH, 16)
    check_scoring([ROW], LAUNCH, 16)
