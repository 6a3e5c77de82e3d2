"""Overlapping iterations by hand through the real engines: who samples from what, what is trained on, what is left."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from stages.engines.manager import EngineManager
from stages.staleness.buffer import RolloutBuffer
from storage.checkpoints import load_checkpoint
from storage.policies import head_version, resolve_policy
from storage.rollout_schema import Family
from storage.rollouts import read_rollouts
from storage.runs import read_iteration
from storage.sql import connect
from tests.helpers.hand_run import HandRun, tiny_run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

JOB = """
mode: async
max_staleness: 1
asynchrony: {spare_prompts: 1, partial_rollouts: true}
generation: {max_num_seqs: 4}
evaluation: {every: 1, prompts: 4}
iterations: 4
engines: {start_timeout_s: 1500}
grpo: {num_mini_batches: 2}
"""


PRODUCE = ("plan", "generate", "infer")
CONSUME = ("train", "commit_policy", "weight_sync", "evaluate")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandRun]:
    """Four iterations; generation runs one ahead, beside training and evaluation."""
    run = tiny_run(tmp_path_factory.mktemp("async"), samples_per_shard=4, changes=JOB, count=2)
    try:
        join(run.lane(*((stage, 0) for stage in ("plan", "prepare", *PRODUCE[1:]))))
        for k in range(4):
            consumer = run.lane(*((stage, k) for stage in CONSUME))
            producer = run.lane(*((stage, k + 1) for stage in PRODUCE)) if k < 3 else None
            join(consumer)
            if producer is not None:
                join(producer)
        join(run.lane(*(("report", k) for k in range(4))))
        yield run
    finally:
        run.stop_engines()


def join(lane: BaseProcess) -> None:
    lane.join(3000)
    assert lane.exitcode == 0


def test_run_ends_at_its_last_iteration_and_keeps_the_bound(finished: HandRun) -> None:
    store, name = finished.store, finished.name

    assert head_version(store, name) == 4
    with connect(store, name) as sql:
        lags = sql.sql(
            "SELECT DISTINCT trained_policy_version - policy_version_first, staleness, "
            "dropped_reason IS NOT DISTINCT FROM 'stale' FROM completions "
            "WHERE split = 'train' AND staleness IS NOT NULL"
        ).fetchall()
    # How far the sides drift apart is a matter of their speed: rows over the bound may be there, withheld.
    assert all(is_withheld == (lag > 1) for lag, _, is_withheld in lags)
    assert all(lag == recorded >= 0 for lag, recorded, _ in lags)
    assert any(lag == 1 for lag, _, _ in lags)
    assert [read_iteration(store, name, k).metrics["lag_limit"] for k in range(4)] == [1.0] * 4


def test_every_token_names_the_version_that_sampled_it(finished: HandRun) -> None:
    for k in range(4):
        for row in read_rollouts(finished.store, finished.name, k).to_pylist():
            versions = row["token_policy_versions"]
            assert len(versions) == len(row["completion_token_ids"])
            assert versions == sorted(versions)
            assert (versions[0], versions[-1]) == (row["policy_version_first"], row["policy_version_last"])
            assert max(0, k - 1) <= versions[0] <= versions[-1] <= k
            policy = resolve_policy(finished.store, finished.name, versions[-1])
            assert row["weights_hash"] == policy.weights_hash


def test_sampler_and_trainer_agree_on_rows_of_the_trained_version(finished: HandRun) -> None:
    """W3, L8: no engine sampled with other weights than it says, whatever was loaded beside it."""
    gaps = []
    for k in range(4):
        for row in read_rollouts(finished.store, finished.name, k, families=[Family.TRAINING]).to_pylist():
            if row["logprob_gap_max"] is not None and set(row["token_policy_versions"]) == {k}:
                gaps.append(row["logprob_gap_max"])
    assert gaps
    assert max(gaps) < 1e-4


def test_groups_are_trained_on_once_refilled_oldest_first_and_none_is_lost(finished: HandRun) -> None:
    """One spare group per iteration: each batch takes what waited first."""
    store, name = finished.store, finished.name
    checkpoint = load_checkpoint(store, name, 4)
    buffer = RolloutBuffer.from_json(checkpoint.manifest.metadata["buffer"], 4)

    with connect(store, name) as sql:
        rows = sql.sql(
            "SELECT iteration, prompt_index, count(*), count(staleness), min(trained_policy_version), "
            "count(DISTINCT row_id), bool_or(dropped_reason = 'stale') "
            "FROM completions WHERE split = 'train' GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()
    assert len(rows) == 4 * 5
    assert all(row[2] == row[5] == 4 for row in rows)  # one training row per completion at most
    waiting = {(row[0], row[1]) for row in rows if row[3] == 0}
    withheld = {(row[0], row[1]) for row in rows if row[6]}
    assert waiting == {group.identity for group in buffer.groups}
    assert (buffer.num_made, buffer.num_withheld) == (20, len(withheld))
    assert buffer.num_trained == 16 == 20 - len(waiting) - len(withheld)
    assert sum(read_iteration(store, name, k).counts["groups_refilled"] for k in range(1, 4)) >= 3


def test_report_has_lag_histogram_and_discard_share(finished: HandRun) -> None:
    """T11, T14, T17: mean lag beside the limit, publish lag apart from it, the discard share always."""
    for k in range(4):
        record = read_iteration(finished.store, finished.name, k)
        histogram = record.metadata["lag_histogram"]
        trained = sum(histogram.values())
        assert trained == record.counts["rows_trained"]
        mean = sum(int(lag) * count for lag, count in histogram.items()) / max(1, trained)
        assert record.metrics["lag_mean"] == (pytest.approx(mean) if trained else None)
        assert record.metrics["discard_fraction"] is not None
        assert record.metrics["discard_fraction_total"] is not None
        assert record.metrics["publish_lag_s"] is not None
        assert record.metadata["correction"]["name"] == "truncated_token"


def test_each_evaluation_is_of_exactly_its_version(finished: HandRun) -> None:
    """Generation of later iterations went on meanwhile; the engine was pinned."""
    for version in range(5):
        rows = read_rollouts(finished.store, finished.name, version, split="eval").to_pylist()
        assert {v for row in rows for v in row["token_policy_versions"]} == {version}
        assert {row["weights_hash"] for row in rows} == {
            resolve_policy(finished.store, finished.name, version).weights_hash
        }


def test_stages_repeated_in_any_order_change_nothing(finished: HandRun) -> None:
    before = [resolve_policy(finished.store, finished.name, version).manifest for version in range(5)]
    for stage, k in (("generate", 2), ("train", 1), ("evaluate", 0)):
        assert finished.stage(stage, k).reused
    assert [resolve_policy(finished.store, finished.name, version).manifest for version in range(5)] == before


def test_one_generation_engine_served_all(finished: HandRun) -> None:
    roles = sorted(record.launch.role for record in EngineManager(finished.state_dir()).list())
    assert roles.count("generation") <= 1
