"""What the train stage does with numbers that are none, and with rollouts that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.engines.protocol import OptimizerStepMetrics, TrainingOutcome, TrainingRequest
from stages.errors import NumericsError
from stages.staleness.buffer import GroupRef, RolloutBuffer, Taken
from stages.train import _train, training_metrics
from stages.training_rows import prepare_rows
from tests.helpers.stage_contexts import make_context, make_run
from tests.unit.stages.test_training_rows import row


def nothing_taken() -> Taken:
    return RolloutBuffer(version=0).take([GroupRef(0, 0, 0)], max_staleness=0, wanted=1)


class FaultyEngine:
    """Fails as a training engine whose loss is not finite."""

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        raise NumericsError("loss was not finite in 3 optimizer steps in a row", row_ids=[request.rows[0].row_id])


class SkippingEngine:
    """Skips one optimizer step."""

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        step = OptimizerStepMetrics(
            optimizer_step=0, is_skipped=True, num_rows=2, num_tokens=4, values={"loss": float("nan"), "lr": 0.5}
        )
        logprobs = [list(r.sampler_logprobs) for r in request.rows]
        return TrainingOutcome(steps=[step], trainer_logprobs=logprobs, skipped_row_ids=[request.rows[1].row_id])


def rows() -> list[dict[str, Any]]:
    return [row(0, 0, 1.0, version=0), row(0, 1, 0.0, version=0)]


def test_rows_of_a_failed_step_are_dumped_to_a_file_that_the_error_names(tmp_path: Path) -> None:
    """N15."""
    context = make_context(make_run(tmp_path), tmp_path, "train", 0)

    with pytest.raises(NumericsError, match="the rows are in") as caught:
        _train(context, FaultyEngine(), prepare_rows(rows(), context.job, 0), [[0, 1]], 0.0)

    (dumped,) = Path(caught.value.attributes["dump"]).read_text().splitlines()
    assert json.loads(dumped)["row_id"] == "0.0"
    assert json.loads(dumped)["completion_token_ids"] == [5, 2]


def test_skipped_step_is_counted_and_dumped(tmp_path: Path) -> None:
    context = make_context(make_run(tmp_path), tmp_path, "train", 0)
    prepared = prepare_rows(rows(), context.job, 0)

    outcome = _train(context, SkippingEngine(), prepared, [[0, 1]], 0.0)

    (dump,) = (tmp_path / "state-a0" / "dumps" / "r").iterdir()
    assert [json.loads(line)["row_id"] for line in dump.read_text().splitlines()] == ["0.1"]
    assert training_metrics(prepared, outcome, nothing_taken())["optimizer_steps"] == [
        {"optimizer_step": 0, "is_skipped": 1.0, "num_rows": 2, "num_tokens": 4, "loss": None, "lr": 0.5}
    ]


def test_iteration_without_signal_makes_no_optimizer_step(tmp_path: Path) -> None:
    """N7: the policy goes on unchanged, and the counts say why."""
    context = make_context(make_run(tmp_path), tmp_path, "train", 0)
    prepared = prepare_rows([row(0, 0, 1.0, version=0), row(0, 1, 1.0, version=0)], context.job, 0)

    outcome = _train(context, FaultyEngine(), prepared, [], 0.0)

    assert outcome is None
    metrics = training_metrics(prepared, outcome, nothing_taken())
    assert (metrics["optimizer_steps"], metrics["staleness"]["histogram"]) == ([], {})
    assert metrics["counts"]["groups_zero_variance"] == 1
