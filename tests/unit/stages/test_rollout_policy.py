"""The job says how long rollouts are kept; commit_policy removes them, and what a resume point needs stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages import commit_policy
from stages.rollout_policy import needed_rollouts, rollout_rule
from stages.spec.execution import StorageSpec
from stages.staleness.buffer import GroupRef, RolloutBuffer
from storage.checkpoints import save_checkpoint
from storage.errors import ObjectMissingError
from storage.rollout_retention import RolloutRule
from storage.rollouts import read_rollouts
from tests.helpers.stage_contexts import commit_iterations, make_context, make_run, publish


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, None),
        ({"keep_rollouts": 3}, RolloutRule(keep_iterations=3)),
        ({"keep_rollouts_days": 2.5}, RolloutRule(keep_days=2.5)),
        ({"keep_rollouts": 3, "keep_rollouts_days": 2.5}, RolloutRule(keep_iterations=3, keep_days=2.5)),
    ],
)
def test_rule_is_what_the_job_says(given: dict[str, float], rule: RolloutRule | None) -> None:
    assert rollout_rule(StorageSpec.model_validate(given)) == rule


@pytest.mark.parametrize("keeps", [True, False])
def test_commit_removes_what_the_job_keeps_no_longer(tmp_path: Path, *, keeps: bool) -> None:
    run = make_run(tmp_path)
    storage = StorageSpec(keep_rollouts=0 if keeps else 1)
    object.__setattr__(run, "job", run.job.model_copy(update={"storage": storage}))
    context = make_context(run, tmp_path, "commit_policy", 3)
    commit_iterations(context, 3)
    publish(context, 4)
    # The resume point of version 4 still waits for a group of iteration 1.
    buffer = RolloutBuffer(version=4, groups=(GroupRef(1, 1, 0),), num_made=1)
    save_checkpoint(
        context.home, "r", 4, {"random_rank_0.safetensors": b"x"}, config_hash=context.job.fingerprint,
        dataset_fingerprint="d2", data_position={}, rng_files=["random_rank_0.safetensors"], created_by="t",
        metadata={"buffer": buffer.to_json()},
    )  # fmt: skip
    assert needed_rollouts(context.home, "r") == {1}

    outcome = commit_policy.run_stage(context)

    assert outcome.metrics["rollouts_removed"] == ([] if keeps else [0, 2])
    assert read_rollouts(context.home, "r", 1).num_rows == 4
    if keeps:
        assert read_rollouts(context.home, "r", 0).num_rows == 4
    else:
        with pytest.raises(ObjectMissingError, match="since the newest 1 iterations are kept"):
            read_rollouts(context.home, "r", 0)
