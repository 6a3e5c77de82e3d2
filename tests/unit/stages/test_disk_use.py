"""The disk of a run stays flat: 25 tiny iterations through the real commits, with attempts that die in between."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from stages import commit_policy
from stages.context import StageContext
from stages.runs import ResolvedRun
from stages.timing import Clock, PhaseTimer
from storage.checkpoints import read_index, save_checkpoint
from storage.layout import data_key, policy_folder
from storage.metrics import export_metrics
from storage.policies import publish_policy
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from tests.helpers.stage_contexts import make_context, make_run

VALUES = 4096
HOUR_S = 3600.0


def _context(run: ResolvedRun, base: Path, iteration: int, attempt: str) -> StageContext:
    """The context of stage commit_policy, hours after the one before (the store's clock is the real one)."""
    context = make_context(run, base, "commit_policy", iteration)
    context.request = context.request.model_copy(update={"attempt": attempt})
    clock = Clock()
    context.timer = PhaseTimer(clock=dataclasses.replace(clock, now=lambda: clock.now() + iteration * HOUR_S))
    return context


def _version(context: StageContext, version: int, attempt: str, *, is_head: bool = False) -> None:
    weights = save({"w": np.full(VALUES, version, dtype=np.float32)})
    save_checkpoint(
        context.home, "r", version, {"random_rank_0.safetensors": weights}, config_hash=context.job.fingerprint,
        dataset_fingerprint="d", data_position={}, rng_files=["random_rank_0.safetensors"], created_by="test",
        attempt=attempt,
    )  # fmt: skip
    publish_policy(
        context.home, "r", version, {"model.safetensors": weights}, created_by="test", is_head=is_head,
        attempt=attempt,
    )  # fmt: skip


def _die(context: StageContext, iteration: int) -> None:
    """Leave what an attempt at training leaves that is killed in the middle of writing."""
    folder = policy_folder("r", iteration + 1)
    context.home.publish(data_key(folder, f"dead-{iteration}", "model.safetensors"), b"x" * 4 * VALUES)
    torn = context.home.local_path(f"{folder}/dead-{iteration}/.tmp-0123")
    assert torn is not None
    torn.write_bytes(b"x" * VALUES)


def _bytes(*places: Path | Store) -> int:
    total = 0
    for place in places:
        if isinstance(place, Path):
            total += sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        else:
            prefixes = [f"r/{name}" for name in ("policies", "trainer", "leases", "metrics")]
            total += sum(info.size for prefix in prefixes for info in place.list(prefix))
    return total


@pytest.mark.parametrize("keep_policies", [2, 4])
def test_disk_stays_flat_over_a_run(tmp_path: Path, keep_policies: int) -> None:
    run = make_run(tmp_path, iterations=25)
    storage = run.job.storage.model_copy(update={"keep_policies": keep_policies, "keep_checkpoints": 1})
    fields = {name: getattr(run.job, name) for name in type(run.job).model_fields}
    run = dataclasses.replace(run, job=type(run.job)(**{**fields, "storage": storage}))
    _version(_context(run, tmp_path, 0, "first"), 0, "first", is_head=True)
    region = open_store(run.roots["b"])
    used = []
    for k in range(25):
        context = _context(run, tmp_path, k, f"a-{k}")
        if k % 4 == 3:
            _die(context, k)
        _version(context, k + 1, f"t-{k}")
        outcome = commit_policy.run_stage(context)
        assert outcome.metrics["policy_version"] == k + 1
        publish_policy(  # what weight_sync does
            region, "r", k + 1, {"model.safetensors": save({"w": np.full(VALUES, k + 1, dtype=np.float32)})},
            created_by="test", is_head=False,
        )  # fmt: skip
        write_iteration(context.home, IterationRecord(run="r", iteration=k, metrics={"reward_mean": 0.5}))
        export_metrics(context.home, "r", created_by="test")
        context.close()
        used.append(_bytes(context.home, region))

    one = 4 * VALUES
    assert used[24] < used[5] + one // 4  # manifests grow by digits, metrics by rows
    # Version 0, the newest ones and the one before that a resume point needs; copies in the region; one resume point.
    assert max(used[5:]) < (2 * keep_policies + 4) * (one + 2000) + 20_000
    assert read_index(context.home, "r") == (25,)


def test_disk_stays_flat_when_the_report_lags(tmp_path: Path) -> None:
    """What is not reported is kept; once it is, it goes."""
    run = make_run(tmp_path, iterations=25)
    _version(_context(run, tmp_path, 0, "first"), 0, "first", is_head=True)
    for k in range(10):
        context = _context(run, tmp_path, k, f"a-{k}")
        _version(context, k + 1, f"t-{k}")
        commit_policy.run_stage(context)
    assert {v for v in range(11) if context.home.exists(f"{policy_folder('r', v)}/manifest.json")} == set(range(11))
    for k in range(10):
        write_iteration(context.home, IterationRecord(run="r", iteration=k))
    commit_policy.run_stage(context)
    kept = {v for v in range(11) if context.home.exists(f"{policy_folder('r', v)}/manifest.json")}
    assert kept == {0, 8, 9, 10}
