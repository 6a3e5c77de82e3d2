"""PPO iterations by hand through the real engines: six tasks, one commit, no training twice after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.critics import resolve_critic
from storage.layout import critic_folder, manifest_key
from storage.policies import head_version, resolve_policy
from storage.rollout_schema import Family
from storage.rollouts import read_rollouts
from storage.runs import read_iteration
from tests.helpers.hand_run import PPO_ITERATION, TINY_PPO_JOB, HandRun, tiny_run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandRun]:
    """One whole iteration; the tests below go on from it, in order."""
    run = tiny_run(tmp_path_factory.mktemp("ppo"), samples_per_shard=8, job_text=TINY_PPO_JOB)
    try:
        run.iteration(0)
        yield run
    finally:
        run.stop_engines()


def test_iteration_commits_policy_critic_and_values(run: HandRun) -> None:
    store, name = run.store, run.name
    assert head_version(store, name) == 1
    assert resolve_critic(store, name, 0).weights_hash != resolve_critic(store, name, 1).weights_hash
    families = (Family.REWARD, Family.REFERENCE, Family.VALUES, Family.TRAINING)
    rows = read_rollouts(store, name, 0, families=families).to_pylist()
    assert len(rows) == 16
    assert {row["critic_version"] for row in rows} == {0}
    # The first critic's head is zero: it says 0 of everything.
    assert {value for row in rows for value in row["values"]} == {0.0}
    assert not any(row["is_dropped"] for row in rows)
    record = read_iteration(store, name, 0)
    assert set(PPO_ITERATION[:-1]) <= record.measured_s.keys()
    assert record.metadata["missing"] == []
    assert record.metrics["value_loss"] > 0.0
    assert record.metrics["explained_variance"] == 0.0
    assert record.metrics["kl_weight"] == 0.05
    # The rule-based reward has no model, so the planner predicts no time for it.
    assert {"reference_inference", "critic_inference", "critic_training", "train"} <= record.predicted_s.keys()


def test_crash_between_critic_and_policy_training_trains_neither_twice(run: HandRun) -> None:
    """The engines die after the critic was trained; the policy's stage then starts from the resume point."""
    for stage in ("plan", "generate", "reward_inference", "reference_inference", "critic_inference"):
        assert not run.stage(stage, 1).reused or stage == "plan"
    first = run.stage("critic_training", 1)
    critic = resolve_critic(run.store, run.name, 2)
    assert run.stage("commit_policy", 1, expected_exit=1).error is not None  # nothing is committed by halves
    assert run.stop_engines() > 0
    assert not run.stage("train", 1).reused
    again = run.stage("critic_training", 1)
    assert (first.reused, again.reused) == (False, True)
    assert resolve_critic(run.store, run.name, 2).manifest.attempt == critic.manifest.attempt
    policy = resolve_policy(run.store, run.name, 2)
    assert run.stage("train", 1).reused
    assert policy.manifest.metadata["data"] == critic.manifest.metadata["data"]


def test_policy_without_its_critic_is_not_committed(run: HandRun) -> None:
    key = manifest_key(critic_folder(run.name, 2))
    content = run.store.read_bytes(key)
    run.store.delete(key)
    refused = run.stage("commit_policy", 1, expected_exit=1)
    assert refused.error is not None
    assert "critic version 2 is not published" in refused.error.message
    assert head_version(run.store, run.name) == 1
    run.store.publish(key, content)
    run.stage("commit_policy", 1)
    assert head_version(run.store, run.name) == 2


def test_controller_goes_on_from_the_resume_point(run: HandRun) -> None:
    first, second = (
        resolve_policy(run.store, run.name, version).manifest.metadata["training"]["kl_control"] for version in (1, 2)
    )
    assert second["kl_weight"] == first["next_kl_weight"]
    # Policy 0 is its own reference: iteration 0 measures no KL, and the weight falls by the least step, 1 - .2 n / h.
    assert first["kl_per_response"] == pytest.approx(0.0, abs=1e-4)
    assert first["next_kl_weight"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 64))


def test_values_after_a_restart_are_those_of_the_trained_critic(run: HandRun) -> None:
    run.stop_engines()
    for stage in ("plan", "generate", "reward_inference", "reference_inference", "critic_inference"):
        run.stage(stage, 2)
    rows = read_rollouts(run.store, run.name, 2, families=(Family.VALUES,)).to_pylist()
    assert {row["critic_version"] for row in rows} == {2}
    assert len({value for row in rows for value in row["values"]}) > 1


def test_finished_stage_of_a_committed_iteration_finds_its_work(run: HandRun) -> None:
    for stage in ("critic_inference", "critic_training", "train"):
        assert run.stage(stage, 1).reused


def test_work_folders_are_left_clean(run: HandRun) -> None:
    assert list(Path(run.state_dir() / "work" / run.name).rglob("*.safetensors")) == []
