from __future__ import annotations

import json
import math

import pytest

from stages.engines.canary import CanaryRecord, canary_rows, check_canary, measure_canary
from stages.errors import ContractError, WeightMismatchError


def record() -> CanaryRecord:
    rows = canary_rows([[1, 5], [1, 6, 7]], vocab_size=16, max_completion_tokens=4)
    return CanaryRecord(rows=rows, trainer_logprobs=[[-1.0, -2.0, -3.0, -4.0]] * 4)


def test_canary_rows_are_the_same_every_time_and_inside_the_vocabulary():
    first, second = record().rows, record().rows
    assert list(first) == list(second)
    assert {len(row.completion_token_ids) for row in first} == {4}
    assert all(0 <= token < 16 for row in first for token in row.completion_token_ids)
    assert [list(row.prompt_token_ids) for row in first] == [[1, 5], [1, 6, 7], [1, 5], [1, 6, 7]]


def test_canary_rows_without_prompts_are_refused():
    with pytest.raises(ContractError, match="at least one prompt"):
        canary_rows([], vocab_size=16, max_completion_tokens=4)


def test_canary_record_survives_json():
    assert CanaryRecord.from_json(json.loads(json.dumps(record().to_json()))) == record()


def test_canary_record_from_another_document_is_refused():
    with pytest.raises(ContractError, match="can't be read"):
        CanaryRecord.from_json({"rows": [{"prompt_token_ids": [1]}], "trainer_logprobs": []})


def test_check_canary_small_gap_passes_and_is_returned():
    scores = [[-1.0, -2.0, -3.0, -4.001]] * 4
    gap = check_canary(record(), scores, max_gap=1e-2, engine="engine A")
    assert (gap.num_tokens, gap.max_abs) == (16, pytest.approx(1e-3))


def test_check_canary_large_gap_names_engine_and_numbers():
    with pytest.raises(WeightMismatchError, match=r"engine A does not compute .* 16 canary tokens .* 1 nats") as caught:
        check_canary(record(), [[-2.0, -3.0, -4.0, -5.0]] * 4, max_gap=1e-2, engine="engine A")
    assert caught.value.attributes["mean_abs"] == 1.0


def test_check_canary_nan_is_a_mismatch():
    with pytest.raises(WeightMismatchError, match="inf"):
        check_canary(record(), [[math.nan, -2.0, -3.0, -4.0]] * 4, max_gap=1e9, engine="engine A")


def test_measure_canary_scores_of_other_rows_are_refused():
    with pytest.raises(ContractError, match="the rows have"):
        measure_canary(record(), [[-1.0]] * 4)
