from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.engines.protocol import OptimizerStepMetrics, TrainingOutcome
from stages.errors import StaleRolloutError
from stages.rl.correction_spec import CorrectionSpec
from stages.spec.job import TrainingJob, load_training_job
from stages.training_columns import training_columns
from stages.training_rows import mini_batches, prepare_rows

TEXT = (Path(__file__).parents[3] / "tests" / "helpers" / "addition" / "job.yaml").read_text()


def job(*changes: tuple[str, str]) -> TrainingJob:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return load_training_job(text, "job.yaml")


def row(prompt: int, sample: int, reward: float | None, *, version: int = 3, finish: str = "stop") -> dict[str, Any]:
    return {
        "row_id": f"{prompt}.{sample}",
        "group_id": f"g{prompt}",
        "prompt_index": prompt,
        "sample_index": sample,
        "prompt_token_ids": [1, 4],
        "completion_token_ids": [5, 2],
        "sampler_logprobs": [-0.5, -1.0],
        "temperature": 1.0,
        "finish_reason": finish,
        "policy_version_first": version,
        "policy_version_last": version,
        "reward": reward,
        "reward_status": "ok" if reward is not None else "crashed",
    }


def async_job(staleness: int) -> TrainingJob:
    return job(("mode: sync", f"mode: async\nmax_staleness: {staleness}"))


@pytest.mark.parametrize(("version", "reason"), [(2, None), (1, None), (0, "stale")])
def test_staleness_bound_is_inclusive_and_counted_at_consumption(version: int, reason: str | None) -> None:
    """T2, T7, T12: the age is trained version minus sampling version, at consumption; exactly the bound is fresh."""
    rows = [row(0, 0, 1.0, version=version), row(0, 1, 0.0, version=version), row(1, 0, 1.0), row(1, 1, 0.0)]

    prepared = prepare_rows(rows, async_job(2), 3)

    assert prepared.staleness == [3 - version, 3 - version, 0, 0]
    assert prepared.reasons == [reason, reason, None, None]
    assert prepared.counts()["dropped_stale"] == (0 if reason is None else 2)


def test_synchronous_training_refuses_stale_rollouts() -> None:
    with pytest.raises(StaleRolloutError, match="lags 1 to 1 policy versions behind version 3, but max_staleness is 0"):
        prepare_rows([row(0, 0, 1.0, version=2), row(0, 1, 0.0, version=2)], job(), 3)


def test_rollouts_of_a_later_version_are_refused() -> None:
    with pytest.raises(StaleRolloutError, match="sampled from policy version 4, but training starts from version 3"):
        prepare_rows([row(0, 0, 1.0, version=4), row(0, 1, 0.0)], job(), 3)


def test_rows_without_reward_do_not_shift_the_baseline() -> None:
    """N12, R11: rewards [1, 3, 2] and one failed verifier: the mean is 2, the failed row is left out."""
    rows = [row(0, 0, 1.0), row(0, 1, 3.0), row(0, 2, 2.0), row(0, 3, None)]

    prepared = prepare_rows(rows, job(("loss: grpo", "loss: dr_grpo")), 3)

    assert [prepared.advantage(place) for place in range(4)] == [-1.0, 1.0, 0.0, None]
    assert prepared.reasons == [None, None, None, "no_reward"]


def test_groups_are_sampling_identities_not_prompt_tokens() -> None:
    """N8: equal prompt tokens in two groups; each group is constant, so nothing is learned and all are counted."""
    rows = [row(0, 0, 0.0), row(0, 1, 0.0), row(1, 0, 1.0), row(1, 1, 1.0)]

    prepared = prepare_rows(rows, job(), 3)

    assert prepared.reasons == ["zero_variance"] * 4
    assert prepared.counts() == {
        "rows": 4, "rows_trained": 0, "dropped_stale": 0, "dropped_aborted": 0, "dropped_no_reward": 0,
        "dropped_zero_variance": 4, "groups": 2, "groups_zero_variance": 2, "groups_empty": 0,
    }  # fmt: skip
    assert mini_batches(prepared, job(), 0, 3) == []


def test_zero_variance_groups_stay_when_the_job_says_so() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 1.0)]

    prepared = prepare_rows(rows, job(("  num_epochs: 1", "  drop_zero_variance_groups: false")), 3)

    assert prepared.kept == [0, 1]
    assert [prepared.advantage(place) for place in (0, 1)] == [0.0, 0.0]


def test_aborted_rows_are_left_out() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(0, 2, 1.0, finish="abort")]

    assert prepare_rows(rows, job(), 3).reasons == [None, None, "aborted"]


def test_overlong_penalty_counts_for_rewards_there_are() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 1.0)]
    rows[1]["completion_token_ids"], rows[1]["sampler_logprobs"] = [5, 5, 5, 5], [-1.0] * 4

    prepared = prepare_rows(
        rows, job(("loss: grpo", "loss: dr_grpo"), ("  num_epochs: 1", "  overlong_buffer_tokens: 2")), 3
    )

    assert [prepared.advantage(place) for place in (0, 1)] == [0.5, -0.5]


def test_mini_batches_hold_whole_groups_in_an_order_of_identities() -> None:
    rows = [row(prompt, sample, float(sample)) for prompt in range(4) for sample in range(2)]
    wanted = job(("num_mini_batches: 1", "num_mini_batches: 2"), ("num_epochs: 1", "num_epochs: 2"))

    prepared = prepare_rows(rows, wanted, 3)
    steps = mini_batches(prepared, wanted, 7, 3)

    assert [len(step) for step in steps] == [4, 4, 4, 4]
    for epoch in (steps[:2], steps[2:]):
        assert sorted(index for step in epoch for index in step) == list(range(8))
        for step in epoch:
            groups = [prepared.training_rows()[index].row_id.split(".")[0] for index in step]
            assert groups[0::2] == groups[1::2]
    assert steps == mini_batches(prepared, wanted, 7, 3)
    assert steps != mini_batches(prepared, wanted, 8, 3)


def test_mini_batch_without_a_kept_row_makes_no_step() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(1, 0, 1.0), row(1, 1, 1.0)]
    wanted = job(("num_mini_batches: 1", "num_mini_batches: 2"))

    assert mini_batches(prepare_rows(rows, wanted, 3), wanted, 0, 0) == [[0, 1]]


def test_temperature_of_each_row_reaches_the_trainer() -> None:
    """L6: the trainer reads the temperature from the row."""
    rows = [row(0, 0, 1.0), {**row(0, 1, 0.0), "temperature": 0.7}]

    assert [r.temperature for r in prepare_rows(rows, job(), 3).training_rows()] == [1.0, 0.7]


def test_training_columns_hold_decisions_and_measurements() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(0, 2, None)]
    prepared = prepare_rows(rows, job(("loss: grpo", "loss: dr_grpo")), 3)
    step = OptimizerStepMetrics(optimizer_step=0, is_skipped=False, num_rows=2, num_tokens=4, values={})
    shift = float(np.log(3.0))
    outcome = TrainingOutcome(steps=[step], trainer_logprobs=[[-0.5, -1.0], [-0.5 + shift, -1.0]])

    columns = training_columns(prepared, outcome, CorrectionSpec(cap=2.0), 3)

    assert columns["0.0"]["importance_weight_mean"] == pytest.approx(1.0)
    assert columns["0.1"] == {
        "row_id": "0.1",
        "advantage": -0.5,
        "is_dropped": False,
        "dropped_reason": None,
        "staleness": 0,
        "trained_policy_version": 3,
        "importance_weight_mean": pytest.approx(2.0),
        "importance_weight_max": pytest.approx(3.0),
        "num_truncated_weights": 1,
        "trainer_logprob_mean": pytest.approx((-1.5 + shift) / 2),
        "trainer_logprob_min": pytest.approx(-1.0),
        "logprob_gap_max": pytest.approx(shift),
    }
    assert columns["0.2"] == {
        "row_id": "0.2", "advantage": None, "is_dropped": True, "dropped_reason": "no_reward", "staleness": 0,
        "trained_policy_version": 3, "importance_weight_mean": None, "importance_weight_max": None,
        "num_truncated_weights": None, "trainer_logprob_mean": None, "trainer_logprob_min": None,
        "logprob_gap_max": None,
    }  # fmt: skip


def test_numbers_that_are_none_become_null() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0)]
    prepared = prepare_rows(rows, job(), 3)
    outcome = TrainingOutcome(steps=[], trainer_logprobs=[[float("nan"), -1.0], [-0.5, -1.0]])

    columns = training_columns(prepared, outcome, CorrectionSpec(), 3)

    assert columns["0.0"]["importance_weight_mean"] is None
    assert columns["0.1"]["importance_weight_mean"] == 1.0
