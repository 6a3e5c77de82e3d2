from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.data.dataset import Dataset
from stages.data.order import prompts_for_iteration
from stages.data.rows import PromptRow
from stages.data.template import EncodedPrompt
from stages.errors import DataError, SpecFaultsError, StageError
from stages.failures import raise_recorded_failure, record_failure
from stages.prompt_build import _write
from stages.prompts import HELD_OUT_NAME, TRAIN_NAME, EncodedRow, Prompts, build_spec, stop_token_ids
from tests.helpers.stage_contexts import make_run


def make_prompts(folder: Path, num_rows: int) -> tuple[Prompts, list[PromptRow]]:
    rows = [
        PromptRow(prompt_id=f"e/{n}", environment="e", prompt=f"p{n}", answer=str(n), metadata={"n": n})
        for n in range(num_rows)
    ]
    encoded = {
        row.prompt_id: EncodedPrompt(prompt_id=row.prompt_id, text=f"<{row.prompt}>", token_ids=(1, place))
        for place, row in enumerate(rows)
    }
    _write(folder / TRAIN_NAME, rows, encoded)
    _write(folder / HELD_OUT_NAME, rows[:2], encoded)
    return Prompts(folder=folder, model_dir=folder, facts={}), rows


def test_stored_prompts_come_back_equal(tmp_path: Path) -> None:
    prompts, rows = make_prompts(tmp_path, 3)

    assert list(prompts.train) == [
        EncodedRow(row=row, text=f"<{row.prompt}>", token_ids=(1, place)) for place, row in enumerate(rows)
    ]


def test_evaluation_takes_a_fixed_sample_of_the_held_out_rows(tmp_path: Path) -> None:
    prompts, _ = make_prompts(tmp_path, 3)

    assert sorted(entry.row.prompt_id for entry in prompts.for_evaluation(0, 9)) == ["e/0", "e/1"]
    assert prompts.for_evaluation(0, 1) == prompts.for_evaluation(0, 2)[:1]


def test_prompts_of_an_iteration_are_those_of_the_dataset_order(tmp_path: Path) -> None:
    """C7, C10: order is a function of seed and iteration, in every epoch."""
    prompts, rows = make_prompts(tmp_path, 10)

    for iteration in (0, 2, 3, 7):
        expected = prompts_for_iteration(Dataset(tuple(rows)), 4, iteration, 3)
        assert [entry.row for entry in prompts.of_iteration(4, iteration, 3)] == expected


def test_every_declared_end_token_counts(tmp_path: Path) -> None:
    """M4: models declare several end ids, in several files."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))

    assert stop_token_ids(tmp_path) == (5, 7, 9)


@pytest.mark.parametrize(
    "name",
    ["data", "template", "rewards", "max_over_length_fraction", "max_response_tokens", "num_prompts", "tokenizer"],
)
def test_cache_key_covers_what_decides_the_prompts(tmp_path: Path, name: str) -> None:
    spec: dict[str, Any] = build_spec(make_run(tmp_path).job, None)

    assert name in spec


@pytest.mark.parametrize(
    "error", [DataError("bad rows", num_faults=2), SpecFaultsError("the job", ["a is 1.", "b is 2."])]
)
def test_error_of_a_child_process_is_raised_again(tmp_path: Path, error: StageError) -> None:
    record_failure(tmp_path / "failure.json", error)

    with pytest.raises(type(error)) as caught:
        raise_recorded_failure(tmp_path / "failure.json", "encoding")

    assert (str(caught.value), dict(caught.value.attributes)) == (str(error), dict(error.attributes))


def test_child_process_without_a_message_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"encoding \(exit code -9\) failed without a message"):
        raise_recorded_failure(tmp_path / "failure.json", "encoding (exit code -9)")
