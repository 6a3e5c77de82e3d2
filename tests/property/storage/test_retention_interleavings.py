"""Readers, writers and retention at once, interleaved call by call: nothing that is in use goes, the rest does."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.checkpoints import load_checkpoint, read_checkpoint_file, save_checkpoint
from storage.errors import ObjectMissingError
from storage.leases import release_lease, take_lease
from storage.manifest import read_part
from storage.policies import publish_policy, resolve_policy
from storage.retention import RetentionRule, apply_retention, collect_orphans
from storage.rollouts import read_rollouts, shard_manifests, write_rollouts
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from storage.verify import verify_run
from tests.helpers.interleaved import Work, run_interleaved
from tests.helpers.storage_builders import NOW, RUN, new_run, policy_files, rollout_rows

SOON = NOW + timedelta(hours=1)
LONG_AFTER = NOW.replace(year=2999)
"""The stores' clock is the real one, so by this time every grace period is over."""
RULE = RetentionRule(keep_newest=2, keep_checkpoints=1)
NEWEST = 5
FILES = {"optimizer.bin": b"state" * 9, "rng-0.bin": b"rng"}

INTERLEAVINGS = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _checkpoint(store: Store, version: int, attempt: str | None = None) -> None:
    save_checkpoint(
        store, RUN, version, FILES, config_hash="c", dataset_fingerprint="d", data_position={}, rng_files=["rng-0.bin"],
        created_by="test", attempt=attempt,
    )  # fmt: skip


def _store() -> Store:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    new_run(store)
    for version in range(1, NEWEST + 1):
        _checkpoint(store, version)
        publish_policy(store, RUN, version, policy_files(version), created_by="test")
        write_iteration(store, IterationRecord(run=RUN, iteration=version - 1))
    write_rollouts(store, RUN, 0, 0, 1, rollout_rows(range(2)), input_fingerprint="old", created_by="test")
    return store


def _clean(store: Store) -> None:
    """One pass as stage commit_policy makes it, but without any grace."""
    apply_retention(store, RUN, RULE, NOW)
    collect_orphans(store, RUN, now=LONG_AFTER, grace_s=0)


def _reader(version: int, name: str) -> Work:
    def work(store: Store) -> None:
        try:
            take_lease(store, RUN, name, expires_at=LONG_AFTER + timedelta(days=1), policy_versions=[version],
                       checkpoint_versions=[version])  # fmt: skip
        except ObjectMissingError:
            return  # it is told before it relies on anything
        policy = resolve_policy(store, RUN, version)
        assert {part.name: read_part(store, part) for part in policy.manifest.parts} == policy_files(version)
        point = load_checkpoint(store, RUN, version)
        assert {name: read_checkpoint_file(store, point, name) for name in FILES} == FILES
        release_lease(store, RUN, name)

    return work


def _rollout_reader(store: Store) -> None:
    take_lease(store, RUN, "rows", expires_at=LONG_AFTER + timedelta(days=1), iterations=[0])
    (manifest,) = shard_manifests(store, RUN, 0)
    for part in manifest.parts:
        assert read_part(store, part)
    release_lease(store, RUN, "rows")


def _trainer(store: Store) -> None:
    take_lease(store, RUN, "train", expires_at=LONG_AFTER + timedelta(days=1), attempts=["a9"])
    _checkpoint(store, NEWEST + 1, "a9")
    publish_policy(store, RUN, NEWEST + 1, policy_files(NEWEST + 1), created_by="test", attempt="a9")
    release_lease(store, RUN, "train")


def _resampler(store: Store) -> None:
    """Sample an iteration again from other inputs, as after a rollback."""
    take_lease(store, RUN, "generate", expires_at=LONG_AFTER + timedelta(days=1), attempts=["a8"])
    write_rollouts(
        store, RUN, 0, 0, 1, rollout_rows(range(3)), input_fingerprint="new", created_by="test", attempt="a8"
    )
    release_lease(store, RUN, "generate")


_WORKS: dict[str, Callable[[], Work]] = {
    "reader of an old version": lambda: _reader(2, "old"),
    "reader of the oldest version": lambda: _reader(1, "oldest"),
    "reader of a kept version": lambda: _reader(NEWEST, "new"),
    "rollout reader": lambda: _rollout_reader,
    "trainer": lambda: _trainer,
    "resampler": lambda: _resampler,
    "retention": lambda: _clean,
}


@INTERLEAVINGS
@given(
    names=st.lists(st.sampled_from(sorted(_WORKS)), min_size=1, max_size=4, unique=True),
    choices=st.lists(st.integers(0, 3), max_size=150),
)
def test_nothing_in_use_goes_and_all_else_does(names: list[str], choices: list[int]) -> None:
    store = _store()

    run_interleaved(store, [_clean, *(_WORKS[name]() for name in names)], choices)

    newest = NEWEST + 1 if "trainer" in names else NEWEST
    assert load_checkpoint(store, RUN).version == newest
    assert resolve_policy(store, RUN, newest).version == newest
    assert read_rollouts(store, RUN, 0).num_rows == (6 if "resampler" in names else 4)
    write_iteration(store, IterationRecord(run=RUN, iteration=NEWEST))
    _clean(store)
    report = verify_run(store, RUN)
    assert report.findings == []
    assert report.num_artefacts == 2 + 1 + 1  # two policies, one resume point, one shard


@INTERLEAVINGS
@given(choices=st.lists(st.integers(0, 1), max_size=60))
def test_two_cleaners_at_once_delete_no_more_than_one(choices: list[int]) -> None:
    """A zombie of stage commit_policy beside its retry."""
    store = _store()

    run_interleaved(store, [_clean, _clean], choices)

    _clean(store)
    assert verify_run(store, RUN).findings == []
    assert load_checkpoint(store, RUN).version == NEWEST
    assert {v for v in range(NEWEST + 1) if _is_there(store, v)} == {NEWEST - 1, NEWEST}


def _is_there(store: Store, version: int) -> bool:
    try:
        return resolve_policy(store, RUN, version).version == version
    except ObjectMissingError:
        return False
