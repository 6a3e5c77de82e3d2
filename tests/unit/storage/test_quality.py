"""The quality report against numbers worked out by hand over a few rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import ObjectMissingError
from storage.layout import quality_report
from storage.parsed_keys import Kind, parse_key
from storage.quality import build_quality_report, read_quality_report, write_quality_report
from storage.rollouts import write_family, write_rollouts
from storage.store import Store, open_store
from tests.helpers.storage_builders import RUN, new_run, reward_row, rollout_row


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three prompts with two samples: rewards 0 and 1; 1 and 1; 0.5 and none."""
    made = open_store(str(tmp_path))
    new_run(made)
    rows = [
        rollout_row(0, 0), rollout_row(0, 1, finish_reason="length"),
        rollout_row(1, 0), rollout_row(1, 1, completion_token_ids=[21, 21]),
        rollout_row(2, 0, completion_text=" "), rollout_row(2, 1, machine="m-1"),
    ]  # fmt: skip
    # Sample 1 of prompt 1 has the tokens of sample 0: 20 + 1 and 21 + 0.
    rewards = [
        reward_row(0, 0, reward=0.0), reward_row(0, 1, reward=1.0), reward_row(1, 0, reward=1.0),
        reward_row(1, 1, reward=1.0), reward_row(2, 0, reward=0.5),
        reward_row(2, 1, reward=None, reward_status="unparsable"),
    ]  # fmt: skip
    facts = {"input_fingerprint": "f", "created_by": "test"}
    write_rollouts(made, RUN, 0, 0, 1, rows, **facts)
    write_family(made, RUN, 0, "reward", 0, 1, rewards, **facts)
    return made


def test_report_counts_what_is_there(store: Store) -> None:
    report = build_quality_report(store, RUN, 0)
    expected = {
        "rows": 6, "prompts": 3, "scored": 5, "reward_mean": 3.5 / 5, "reward_p50": 1.0, "tokens_mean": 2.0,
        "tokens_max": 2, "truncated_fraction": 1 / 6, "empty_fraction": 1 / 6, "unscored_fraction": 1 / 6,
        # Prompts 1 and 2 have no two rewards that differ; prompt 1 has the same tokens twice.
        "flat_fraction": 2 / 3, "repeated_fraction": (0 + 1 / 2 + 0) / 3,
    }  # fmt: skip
    assert {name: report.totals[name] for name in expected} == pytest.approx(expected)
    assert report.counts["reward_status"] == {"ok": 5, "unparsable": 1}
    assert report.counts["finish_reason"] == {"length": 1, "stop": 5}
    assert report.counts["machine"] == {"m-0": 5, "m-1": 1}
    assert [row["prompt_id"] for row in report.worst_prompts] == ["arithmetic/0", "arithmetic/2", "arithmetic/1"]
    assert report.faults == ["empty_fraction"]


def test_report_is_kept_beside_the_iteration_and_comes_out_the_same_again(store: Store) -> None:
    key = write_quality_report(store, build_quality_report(store, RUN, 0))
    before = store.read_bytes(key)
    write_quality_report(store, build_quality_report(store, RUN, 0))
    assert store.read_bytes(key) == before
    assert (key, parse_key(key).kind, parse_key(key).number) == (quality_report(RUN, 0), Kind.QUALITY, 0)
    assert read_quality_report(store, RUN, 0).totals["rows"] == 6


def test_an_iteration_without_rewards_is_unscored(store: Store) -> None:
    facts = {"input_fingerprint": "f", "created_by": "test"}
    write_rollouts(store, RUN, 1, 0, 1, [rollout_row(0, 0, 1), rollout_row(0, 1, 1)], **facts)
    report = build_quality_report(store, RUN, 1)
    assert (report.totals["reward_mean"], report.totals["unscored_fraction"]) == (None, 1.0)
    assert report.counts["reward_status"] == {"none": 2}
    assert "unscored_fraction" in report.faults


def test_an_iteration_without_rollouts_is_said(store: Store) -> None:
    with pytest.raises(ObjectMissingError, match="no committed rollouts of iteration 5"):
        build_quality_report(store, RUN, 5)
