"""Leases of stage processes: taken, given back, and given back for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stages.errors import EngineUnavailableError
from stages.lease import StageLease
from stages.policy_files import checkpoint_directory, policy_at_home, policy_directory
from storage.checkpoints import load_checkpoint
from storage.errors import ObjectMissingError
from storage.leases import live_leases, take_lease
from storage.retention import RetentionRule, apply_retention
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from tests.helpers.stage_contexts import make_context, make_run, publish

NOW = datetime.now(UTC)


def _lease(store: Store, folder: Path, attempt: str = "a1") -> StageLease:
    return StageLease(
        store, "r", holder="train-a0-3", attempt=attempt, iterations=(3, 4), folder=folder,
        ends_at=NOW.timestamp() + 3600,
    )  # fmt: skip


def test_lease_names_attempt_and_iteration_and_is_given_back(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), is_synced=False)
    lease = _lease(store, tmp_path / "leases")

    lease.take()
    lease.take()

    (held,) = live_leases(store, "r", NOW)
    assert (held.attempts, held.iterations, held.policy_versions) == (("a1",), (3, 4), ())
    assert held.expires_at == datetime.fromtimestamp(NOW.timestamp() + 3600, UTC)
    lease.release()
    lease.release()
    assert (live_leases(store, "r", NOW), list((tmp_path / "leases").iterdir())) == ([], [])


def test_lease_of_a_killed_stage_is_given_back_by_the_next_one_on_the_machine(tmp_path: Path) -> None:
    code = (
        "import sys, time, tests.unit.stages.test_lease as t\n"
        "from pathlib import Path\n"
        "base = Path(sys.argv[1])\n"
        "store = t.open_store(str(base / 'store'), is_synced=False)\n"
        "lease = t._lease(store, base / 'leases', 'dead')\n"
        "lease.take(); print('held', flush=True); time.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "held\n"
        store = open_store(str(tmp_path / "store"), is_synced=False)
        beside = _lease(store, tmp_path / "leases", "beside")  # alive as long as the object is: it owns the lock
        beside.take()
        assert sorted(held.attempts[0] for held in live_leases(store, "r", NOW)) == ["beside", "dead"]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()

    later = _lease(store, tmp_path / "leases", "later")
    later.take()

    assert sorted(held.attempts[0] for held in live_leases(store, "r", NOW)) == ["beside", "later"]
    beside.release()
    later.release()


def test_attempt_that_already_works_is_not_worked_on_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.lease._LOOK_S", 0.0)
    store = open_store(str(tmp_path / "store"), is_synced=False)
    first = _lease(store, tmp_path / "leases")
    first.take()
    with pytest.raises(EngineUnavailableError, match="is already running"):
        _lease(store, tmp_path / "leases").take()
    first.release()


def test_files_that_a_stage_was_given_stay_while_it_works(tmp_path: Path) -> None:
    """W6: whatever retention does meanwhile."""
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "evaluate", 0)
    for version in range(6):
        publish(context, version, is_head=True)
        write_iteration(context.home, IterationRecord(run="r", iteration=version))

    policy = policy_directory(context, policy_at_home(context, 1))
    point = checkpoint_directory(context, load_checkpoint(context.home, "r", 2))
    report = apply_retention(context.home, "r", RetentionRule(keep_newest=1, keep_checkpoints=1), NOW)

    assert sorted(path.name for path in policy.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in point.iterdir()] == ["random_rank_0.safetensors"]
    assert report.spared == ["r/policies/1", "r/trainer/2"]
    with pytest.raises(ObjectMissingError, match="cannot be leased"):
        context.lease.hold(policies=[3])
    assert live_leases(context.home, "r", NOW)[0].policy_versions == (1,)  # what it held before it still holds
    context.close()
    report = apply_retention(context.home, "r", RetentionRule(keep_newest=1, keep_checkpoints=1), NOW)
    assert report.deleted == ["r/policies/1", "r/trainer/2"]


def test_lease_outlives_the_deadline_of_its_stage(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "train", 0)
    context.lease.take()
    (held,) = live_leases(context.home, "r", NOW)
    ends_at = datetime.fromtimestamp(context.clock.now(), UTC) + timedelta(seconds=600)
    assert ends_at + timedelta(seconds=250) < held.expires_at < ends_at + timedelta(seconds=350)
    context.close()


def test_stage_sees_a_version_that_is_about_to_go_as_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "evaluate", 0)
    for version in range(4):
        publish(context, version, is_head=True)
        write_iteration(context.home, IterationRecord(run="r", iteration=version))
    policy = policy_at_home(context, 1)
    apply_retention(context.home, "r", RetentionRule(keep_newest=1), NOW)
    with pytest.raises(ObjectMissingError, match="policies/1 cannot be leased"):
        policy_directory(context, policy)
    take_lease(context.home, "r", "x", expires_at=NOW + timedelta(hours=1), policy_versions=[3])
