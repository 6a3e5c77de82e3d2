"""Leases, retention and orphans."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage.checkpoints import load_checkpoint, read_index, save_checkpoint
from storage.critics import publish_critic
from storage.errors import CorruptObjectError, InvalidInputError, ObjectMissingError, TransientStorageError
from storage.layout import checkpoint_folder, critic_folder, lease, policy_folder, retention_ledger
from storage.leases import RetentionLedger, live_leases, read_ledger, release_lease, take_lease
from storage.manifest import find_valid
from storage.policies import publish_policy, resolve_policy
from storage.retention import RetentionRule, apply_retention, collect_orphans, kept_versions
from storage.rollouts import read_rollouts
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from tests.helpers.dict_store import DictStore
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN, policy_files, write_iteration_data

LATER = NOW + timedelta(hours=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path), is_synced=False)


def _policies(store: Store, versions: range, unreported: Collection[int] = ()) -> None:
    """Commit versions, with the records of the iterations that made them, but for some iterations."""
    for version in versions:
        publish_policy(store, RUN, version, policy_files(version), created_by="test")
        if version - 1 not in {-1, *unreported}:
            write_iteration(store, IterationRecord(run=RUN, iteration=version - 1))


def _checkpoint(store: Store, version: int) -> None:
    save_checkpoint(
        store,
        RUN,
        version,
        {"opt.bin": b"x" * version, "rng.bin": b"r"},
        config_hash="c",
        dataset_fingerprint="d",
        data_position={},
        rng_files=["rng.bin"],
        created_by="test",
    )


def _there(store: Store, versions: range) -> list[int]:
    return [version for version in versions if find_valid(store, policy_folder(RUN, version)) is not None]


@pytest.mark.parametrize(
    ("rule", "head", "kept"),
    [
        (RetentionRule(keep_newest=1), None, {0, 9}),
        (RetentionRule(keep_newest=3), None, {0, 7, 8, 9}),
        (RetentionRule(keep_newest=1, keep_every=4), None, {0, 4, 8, 9}),
        (RetentionRule(keep_newest=1), 9, {0, 8, 9}),
        (RetentionRule(keep_newest=1, max_staleness=2), 9, {0, 6, 7, 8, 9}),
        (RetentionRule(keep_newest=1, max_staleness=0), 5, {0, 4, 5, 6, 7, 8, 9}),
        (RetentionRule(keep_newest=1, keep_always=(3,)), None, {3, 9}),
    ],
)
def test_rule_keeps_newest_every_kth_needed_and_named(rule: RetentionRule, head: int | None, kept: set[int]) -> None:
    assert kept_versions(range(10), rule, head=head) == kept


def test_rule_that_would_keep_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="keep_newest, keep_checkpoints, keep_every >= 1"):
        RetentionRule(keep_newest=0)
    with pytest.raises(InvalidInputError, match="keep_newest, keep_checkpoints, keep_every >= 1"):
        RetentionRule(keep_checkpoints=0)


def test_c6_old_goes_only_while_a_newer_complete_one_exists(store: Store) -> None:
    """C6: keep=1 deleted the old one before the new one was saved."""
    _checkpoint(store, 1)
    with pytest.raises(Crash):
        _checkpoint(FaultyStore(store, at=3, fault=Fault.CRASH), 2)  # type: ignore[arg-type]  # a Store by structure
    rule = RetentionRule(keep_checkpoints=1)
    apply_retention(store, RUN, rule, NOW)
    assert load_checkpoint(store, RUN).version == 1
    _checkpoint(store, 2)
    apply_retention(store, RUN, rule, NOW)
    assert (load_checkpoint(store, RUN).version, read_index(store, RUN)) == (2, (2,))
    assert list(store.list(checkpoint_folder(RUN, 1))) == []


def test_c6_damaged_newest_does_not_count(store: Store) -> None:
    """C6: only complete versions justify a deletion."""
    _policies(store, range(1, 4))
    store.delete(resolve_policy(store, RUN, 3).manifest.parts[0].path)
    report = apply_retention(store, RUN, RetentionRule(keep_newest=1, keep_always=()), NOW)
    assert report.deleted == [policy_folder(RUN, 1)]
    assert _there(store, range(1, 4)) == [2]


def test_what_one_pass_reads_badly_it_does_not_delete() -> None:
    """A manifest of which half arrived looks like that of a broken version; the pass must not act on that alone."""
    whole, rule = DictStore("whole"), RetentionRule(keep_newest=2, keep_checkpoints=2, keep_always=())
    _policies(whole, range(1, 5))
    for version in range(1, 5):
        _checkpoint(whole, version)

    def copied() -> DictStore:
        store = DictStore("copy")
        store.objects = dict(whole.objects)
        return store

    counting = FaultyStore(copied())
    apply_retention(counting, RUN, rule, NOW)
    for at in range(len(counting.calls)):
        store = copied()
        with suppress(TransientStorageError, CorruptObjectError):
            apply_retention(FaultyStore(store, at, Fault.SHORT), RUN, rule, NOW)
        assert {3, 4} <= set(_there(store, range(1, 5))), at
        assert {3, 4} <= set(read_index(store, RUN)), at
        assert all(find_valid(store, checkpoint_folder(RUN, version)) for version in (3, 4)), at
        apply_retention(store, RUN, rule, NOW)
        assert (_there(store, range(1, 5)), read_index(store, RUN)) == ([3, 4], (3, 4)), at


def test_policies_and_resume_points_have_their_own_numbers_to_keep(store: Store) -> None:
    _policies(store, range(7))
    for version in range(1, 7):
        _checkpoint(store, version)
    apply_retention(store, RUN, RetentionRule(keep_newest=3, keep_checkpoints=1, keep_every=4), NOW)
    assert _there(store, range(7)) == [0, 4, 5, 6]
    assert read_index(store, RUN) == (4, 6)  # a run can be rewound to what is kept for good


def test_resume_point_of_the_head_stays_beside_one_that_is_not_in_force_yet(store: Store) -> None:
    """Training has finished version 5, but it was never committed: the run goes on from version 4."""
    _policies(store, range(5))
    for version in range(1, 6):
        _checkpoint(store, version)
    apply_retention(store, RUN, RetentionRule(keep_newest=1, keep_checkpoints=1), NOW)
    assert read_index(store, RUN) == (4, 5)


def test_critics_go_with_the_resume_points_unless_leased_or_unreported(store: Store) -> None:
    _policies(store, range(7), unreported=(1,))
    for version in range(7):
        weights = policy_files(version)["model.safetensors"]
        publish_critic(
            store, RUN, version, {"model.safetensors": weights}, {"optimizer.bin": b"x"}, config_hash="c",
            dataset_fingerprint="d", created_by="test",
        )  # fmt: skip
    take_lease(store, RUN, "values", expires_at=LATER, critic_versions=[3])
    rule = RetentionRule(keep_newest=1, keep_checkpoints=2)
    report = apply_retention(store, RUN, rule, NOW)
    kept = [version for version in range(7) if find_valid(store, critic_folder(RUN, version)) is not None]
    assert kept == [0, 2, 3, 5, 6]
    assert report.spared == [critic_folder(RUN, 3)]
    with pytest.raises(ObjectMissingError, match="critics/4 cannot be leased"):
        take_lease(store, RUN, "late", expires_at=LATER, critic_versions=[4])


def test_version_whose_iteration_is_not_reported_stays(store: Store) -> None:
    """Evaluation and report of iteration k read version k + 1, however far the training has gone on."""
    _policies(store, range(7), unreported=(1, 3))
    rule = RetentionRule(keep_newest=1)
    apply_retention(store, RUN, rule, NOW)
    assert _there(store, range(7)) == [0, 2, 4, 5, 6]
    write_iteration(store, IterationRecord(run=RUN, iteration=1))
    apply_retention(store, RUN, rule, NOW)
    assert _there(store, range(7)) == [0, 4, 5, 6]


def test_copies_in_other_regions_go_with_the_version(store: Store, tmp_path: Path) -> None:
    other = open_store(str(tmp_path / "other"), is_synced=False)
    _policies(store, range(5))
    for version in (1, 2, 4):
        publish_policy(other, RUN, version, policy_files(version), created_by="test", is_head=False)
    take_lease(store, RUN, "sampler", expires_at=LATER, policy_versions=[2])
    report = apply_retention(store, RUN, RetentionRule(keep_newest=1), NOW, copies=[other])
    assert (report.deleted, report.spared) == ([policy_folder(RUN, 1)], [policy_folder(RUN, 2)])
    assert (_there(store, range(5)), _there(other, range(5))) == ([0, 2, 3, 4], [2, 4])


def test_w6_leased_version_outlives_any_number_of_newer_ones(store: Store) -> None:
    """W6: clean-up deleted a version before it was loaded."""
    _policies(store, range(1, 7))
    take_lease(store, RUN, "engine", expires_at=LATER, policy_versions=[2])
    rule = RetentionRule(keep_newest=1, keep_always=())
    for _ in range(3):
        apply_retention(store, RUN, rule, NOW)
    assert _there(store, range(1, 7)) == [2, 5, 6]
    apply_retention(store, RUN, rule, LATER)
    assert _there(store, range(1, 7)) == [5, 6]


def test_version_that_is_being_deleted_cannot_be_leased(store: Store) -> None:
    _policies(store, range(1, 5))
    ledger = RetentionLedger(retired={policy_folder(RUN, 1): NOW})
    store.publish(retention_ledger(RUN), ledger.model_dump_json().encode())
    with pytest.raises(ObjectMissingError, match="not committed or about to be deleted"):
        take_lease(store, RUN, "late", expires_at=LATER, policy_versions=[1])
    assert live_leases(store, RUN, NOW) == []


def test_pass_that_died_is_taken_up_by_the_next_one(tmp_path: Path) -> None:
    """Every store call of a pass is once the last one before its death."""
    rule = RetentionRule(keep_newest=1, keep_always=())
    for at in range(1000):
        store = open_store(str(tmp_path / str(at)), is_synced=False)
        _policies(store, range(1, 5))
        faulty = FaultyStore(store, at, Fault.CRASH_AFTER)
        try:
            apply_retention(faulty, RUN, rule, NOW)  # type: ignore[arg-type]  # a Store by structure
        except Crash:
            assert set(_there(store, range(1, 5))) >= {3, 4}
        apply_retention(store, RUN, rule, NOW)
        assert _there(store, range(1, 5)) == [3, 4]
        assert read_ledger(store, RUN).retired == {}
        collect_orphans(store, RUN, now=datetime.now(UTC) + timedelta(hours=1))
        assert [info.key for version in (1, 2) for info in store.list(policy_folder(RUN, version))] == []
        if len(faulty.calls) <= at:
            return  # the pass was over before
    pytest.fail("a pass of retention makes more than 1000 calls")


def test_unreadable_lease_stops_retention(store: Store) -> None:
    _policies(store, range(1, 5))
    store.publish(lease(RUN, "torn"), b'{"format":')
    with pytest.raises(CorruptObjectError, match=r"leases/torn\.json"):
        apply_retention(store, RUN, RetentionRule(keep_newest=1), NOW)
    assert _there(store, range(1, 5)) == [1, 2, 3, 4]


def test_lease_is_renewed_ended_and_needs_a_time_zone(store: Store) -> None:
    _policies(store, range(1, 3))
    take_lease(store, RUN, "engine", expires_at=NOW, policy_versions=[1])
    assert live_leases(store, RUN, NOW) == []
    renewed = take_lease(store, RUN, "engine", expires_at=LATER, policy_versions=[2, 1, 2])
    assert renewed.policy_versions == (1, 2)
    assert live_leases(store, RUN, NOW) == [renewed]
    assert (release_lease(store, RUN, "engine"), release_lease(store, RUN, "engine")) == (True, False)
    with pytest.raises(InvalidInputError, match="no time zone"):
        take_lease(store, RUN, "engine", expires_at=datetime(2026, 1, 1))  # noqa: DTZ001 - the fault tested


def test_orphans_go_after_grace_and_committed_data_stays(store: Store, tmp_path: Path) -> None:
    write_iteration_data(store)
    _policies(store, range(2))
    dead = f"{RUN}/iterations/1/rollouts/shard-00000/a0dead/rows.parquet"
    store.publish(dead, b"half an attempt")
    replaced = f"{policy_folder(RUN, 0)}/a0older/model.safetensors"
    store.publish(replaced, b"lost the race")
    torn = [f"{RUN}/iterations/1/.tmp-0123", f"{policy_folder(RUN, 0)}/a0older/.tmp-4567"]
    for temporary in torn:
        (tmp_path / temporary).write_bytes(b"torn")
    now = datetime.now(UTC)
    assert collect_orphans(store, RUN, now=now, grace_s=3600) == []
    deleted = collect_orphans(store, RUN, now=now + timedelta(hours=2), grace_s=3600)
    assert sorted(deleted) == sorted([dead, replaced, *torn])
    assert read_rollouts(store, RUN, 0, families=["reward"]).num_rows == 8
    assert _there(store, range(2)) == [0, 1]


def test_orphans_of_a_live_attempt_and_of_an_iteration_that_is_read_stay(store: Store) -> None:
    written = f"{policy_folder(RUN, 3)}/alive/model.safetensors"
    read = f"{RUN}/iterations/1/rollouts/shard-00000/a0replaced/rows.parquet"
    for key in (written, read):
        store.publish(key, b"bytes")
    now = datetime.now(UTC)
    take_lease(store, RUN, "train", expires_at=now + timedelta(hours=9), attempts=["alive"])
    take_lease(store, RUN, "infer", expires_at=now + timedelta(hours=9), iterations=[1])
    assert collect_orphans(store, RUN, now=now + timedelta(hours=8)) == []
    release_lease(store, RUN, "infer")
    assert collect_orphans(store, RUN, now=now + timedelta(hours=8)) == [read]
    assert collect_orphans(store, RUN, now=now + timedelta(hours=10)) == [written]


def test_replaced_object_stays_for_the_grace_after_its_replacement(store: Store, tmp_path: Path) -> None:
    """People read without a lease, e.g. the metrics, which every iteration replaces."""
    moments = {"a1": 0, "a2": 5000, "a3": 9000}
    start = datetime.now(UTC)
    for attempt, seconds in moments.items():
        key = f"{RUN}/metrics/{attempt}/metrics.parquet"
        store.publish(key, b"rows")
        moment = start.timestamp() + seconds
        os.utime(tmp_path / key, (moment, moment))
    assert collect_orphans(store, RUN, now=start + timedelta(seconds=5100), grace_s=600) == []
    deleted = collect_orphans(store, RUN, now=start + timedelta(seconds=9100), grace_s=600)
    assert deleted == [f"{RUN}/metrics/a1/metrics.parquet"]


def test_objects_below_a_manifest_that_cannot_be_read_stay(store: Store) -> None:
    _policies(store, range(1))
    manifest = resolve_policy(store, RUN, 0).manifest
    store.publish(manifest.key, b"torn")
    assert collect_orphans(store, RUN, now=datetime.now(UTC) + timedelta(days=9), grace_s=0) == []
    assert all(store.exists(part.path) for part in manifest.parts)
