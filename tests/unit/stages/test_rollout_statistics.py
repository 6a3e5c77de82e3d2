from __future__ import annotations

from typing import Any

import pytest

from stages.evaluations import evaluation_score
from stages.rollout_statistics import lasting_troubles, rollout_metrics, troubles_of


def row(reward: float | None, length: int = 2, finish: str = "stop", **columns: Any) -> dict[str, Any]:
    status = columns.pop("status", "ok" if reward is not None else "truncated")
    return {
        "completion_token_ids": [1] * length, "finish_reason": finish, "reward": reward, "reward_status": status,
        "is_dropped": False, "dropped_reason": None, "staleness": 0, "logprob_gap_max": 0.5,
        "importance_weight_mean": 1.0, "importance_weight_max": 2.0, **columns,
    }  # fmt: skip


def test_metrics_separate_failures_from_wrong_answers() -> None:
    """R11: a failure has no reward and does not enter the mean."""
    rows = [
        row(1.0), row(0.0, 4), row(None, 6, "length", is_dropped=True, dropped_reason="no_reward"),
        row(None, status="timed_out", is_dropped=True, dropped_reason="stale", staleness=2),
    ]  # fmt: skip

    metrics, counts = rollout_metrics(rows, rows)

    assert counts == {
        "rows": 4, "tokens": 14, "truncated": 1, "reward_status_ok": 2, "reward_status_timed_out": 1,
        "reward_status_truncated": 1, "dropped_no_reward": 1, "dropped_stale": 1, "staleness_0": 3, "staleness_2": 1,
    }  # fmt: skip
    expected = {
        "reward_mean": 0.5, "reward_std": 0.5, "truncated_fraction": 0.25, "dropped_fraction": 0.5,
        "dropped_fraction_stale": 0.25, "staleness_mean": 0.5, "staleness_max": 2.0, "response_tokens_mean": 3.5,
        "logprob_gap_max": 0.5, "importance_weight_max": 2.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_metrics_of_nothing_are_undefined_and_never_nan() -> None:
    metrics, counts = rollout_metrics(rows := [row(None, is_dropped=True, dropped_reason="no_reward")], rows)

    assert (metrics["reward_mean"], metrics["reward_std"], counts["rows"]) == (None, None, 1)


def test_troubles_name_what_is_wrong() -> None:
    """M9, R9, N7; T9: a run whose rollouts are all too old goes on, and says so."""
    assert troubles_of([row(None, finish="length")] * 2, 0, 0, 1) == ["all_truncated", "no_reward"]
    assert troubles_of([row(-5.0)] * 4, 2, 2, 2) == ["constant_reward", "no_signal"]
    assert troubles_of([row(0.0), row(0.0), row(1.0), row(1.0)], 2, 2, 2) == ["no_signal"]
    assert troubles_of([row(0.0), row(1.0)], 1, 0, 1) == []
    assert troubles_of([row(0.0), row(1.0)], 0, 0, 0) == ["all_stale"]


def test_alarm_needs_the_same_trouble_in_consecutive_iterations() -> None:
    assert lasting_troubles([["constant_reward"], ["constant_reward"]], 3) == {}
    assert lasting_troubles([["constant_reward"], [], ["constant_reward"]], 3) == {}
    alarms = lasting_troubles([["no_signal"], ["no_signal", "constant_reward"], ["no_signal"]], 3)
    assert list(alarms) == ["no_signal"]
    assert alarms["no_signal"].startswith("no_signal in 3 iterations in a row: no prompt group has different rewards")


def test_evaluation_counts_missing_answers_as_wrong_and_leaves_failures_out() -> None:
    rows = [
        {"reward": 1.0, "reward_status": "ok"},
        {"reward": 0.0, "reward_status": "ok"},
        {"reward": None, "reward_status": "truncated"},
        {"reward": None, "reward_status": "unparsable"},
        {"reward": None, "reward_status": "crashed"},
    ]

    assert evaluation_score(rows) == {
        "score": 0.25,
        "reward_status": {"crashed": 1, "ok": 2, "truncated": 1, "unparsable": 1},
        "num_judged": 4,
    }
