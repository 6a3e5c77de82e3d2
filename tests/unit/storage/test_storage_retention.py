"""Leases, retention and orphans."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage.checkpoints import load_checkpoint, read_index, save_checkpoint
from storage.errors import CorruptObjectError, InvalidInputError, ObjectMissingError
from storage.layout import checkpoint_folder, lease, policy_folder
from storage.leases import live_leases, read_ledger, release_lease, take_lease
from storage.manifest import find_valid
from storage.policies import publish_policy, resolve_policy
from storage.retention import RetentionRule, apply_retention, collect_orphans, kept_versions
from storage.rollouts import read_rollouts
from storage.store import Store, open_store
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN, policy_files, write_iteration_data

LATER = NOW + timedelta(hours=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path), is_synced=False)


def _policies(store: Store, versions: range) -> None:
    for version in versions:
        publish_policy(store, RUN, version, policy_files(version), created_by="test")


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
    with pytest.raises(InvalidInputError, match="keep_newest, keep_every >= 1"):
        RetentionRule(keep_newest=0)


def test_c6_old_goes_only_while_a_newer_complete_one_exists(store: Store) -> None:
    """C6: keep=1 deleted the old one before the new one was saved."""
    _checkpoint(store, 1)
    with pytest.raises(Crash):
        _checkpoint(FaultyStore(store, at=3, fault=Fault.CRASH), 2)  # type: ignore[arg-type]  # a Store by structure
    rule = RetentionRule(keep_newest=1, keep_always=(), grace_s=0)
    for _ in range(3):
        apply_retention(store, RUN, rule, NOW)
    assert load_checkpoint(store, RUN).version == 1
    _checkpoint(store, 2)
    for _ in range(2):
        apply_retention(store, RUN, rule, NOW)
    assert (load_checkpoint(store, RUN).version, read_index(store, RUN)) == (2, (2,))
    assert list(store.list(checkpoint_folder(RUN, 1))) == []


def test_c6_damaged_newest_does_not_count(store: Store) -> None:
    """C6: only complete versions justify a deletion."""
    _policies(store, range(1, 4))
    store.delete(resolve_policy(store, RUN, 3).manifest.parts[0].path)
    rule = RetentionRule(keep_newest=1, keep_always=(), grace_s=0)
    report = apply_retention(store, RUN, rule, NOW)
    assert report.retired == [policy_folder(RUN, 1)]


def test_w6_leased_version_outlives_any_number_of_newer_ones(store: Store) -> None:
    """W6: clean-up deleted a version before it was loaded."""
    _policies(store, range(1, 7))
    take_lease(store, RUN, "engine", expires_at=LATER, policy_versions=[2])
    rule = RetentionRule(keep_newest=1, keep_always=(), grace_s=0)
    for _ in range(3):
        apply_retention(store, RUN, rule, NOW)
    assert _there(store, range(1, 7)) == [2, 5, 6]
    for _ in range(2):
        apply_retention(store, RUN, rule, LATER)
    assert _there(store, range(1, 7)) == [5, 6]


def test_version_about_to_go_cannot_be_leased_and_a_lease_in_time_spares_it(store: Store) -> None:
    _policies(store, range(1, 5))
    take_lease(store, RUN, "early", expires_at=LATER, policy_versions=[1])
    rule = RetentionRule(keep_newest=1, keep_always=(), grace_s=600)
    assert apply_retention(store, RUN, rule, NOW).retired == [policy_folder(RUN, 2)]
    with pytest.raises(ObjectMissingError, match="not committed or about to be deleted"):
        take_lease(store, RUN, "late", expires_at=LATER, policy_versions=[2])
    assert [held.holder for held in live_leases(store, RUN, NOW)] == ["early"]
    assert read_ledger(store, RUN).retired == {policy_folder(RUN, 2): NOW}


def test_lease_published_before_the_mark_was_seen_spares_the_version(store: Store) -> None:
    """The race: lease and mark cross; retention looks again before it deletes."""
    _policies(store, range(1, 5))
    rule = RetentionRule(keep_newest=1, keep_always=(), grace_s=600)
    held = take_lease(store, RUN, "reader", expires_at=LATER, policy_versions=[1])
    release_lease(store, RUN, "reader")
    assert policy_folder(RUN, 1) in apply_retention(store, RUN, rule, NOW).retired
    store.publish(lease(RUN, "reader"), held.model_dump_json().encode())
    report = apply_retention(store, RUN, rule, NOW + timedelta(seconds=601))
    assert (report.spared, report.deleted) == ([policy_folder(RUN, 1)], [policy_folder(RUN, 2)])
    assert _there(store, range(1, 5)) == [1, 3, 4]


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
    superseded = f"{policy_folder(RUN, 0)}/a0older/model.safetensors"
    store.publish(superseded, b"lost the race")
    temporary = f"{RUN}/iterations/1/.tmp-0123"
    (tmp_path / temporary).write_bytes(b"torn")
    now = datetime.now(UTC)
    assert collect_orphans(store, RUN, now=now, grace_s=3600) == []
    deleted = collect_orphans(store, RUN, now=now + timedelta(hours=2), grace_s=3600)
    assert sorted(deleted) == sorted([dead, superseded, temporary])
    assert read_rollouts(store, RUN, 0, families=["reward"]).num_rows == 8
    assert _there(store, range(2)) == [0, 1]


def test_objects_below_a_manifest_that_cannot_be_read_stay(store: Store) -> None:
    _policies(store, range(1))
    manifest = resolve_policy(store, RUN, 0).manifest
    store.publish(manifest.key, b"torn")
    assert collect_orphans(store, RUN, now=datetime.now(UTC) + timedelta(days=9), grace_s=0) == []
    assert all(store.exists(part.path) for part in manifest.parts)
