"""Readers see all or nothing under a crash at any call; a retry completes; nothing is doubled."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.checkpoints import load_checkpoint, read_checkpoint_file, save_checkpoint
from storage.errors import CorruptObjectError, ObjectMissingError, TransientStorageError
from storage.policies import head_version, publish_policy, resolve_policy
from storage.retention import RetentionRule, apply_retention, collect_orphans
from storage.retry import RetryingStore, RetryPolicy
from storage.rollouts import find_shard, read_rollouts, write_rollouts
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from storage.verify import Severity, verify_run
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN, new_run, policy_files, rollout_rows

FILES = {"optimizer.bin": b"state" * 100, "rng-0.bin": b"rng"}
CRASHES = (Fault.CRASH, Fault.CRASH_AFTER)


@dataclass
class Work:
    """One step of an iteration, written as a stage would: look for the result first, then make it."""

    run: Callable[[Store], None]
    read: Callable[[Store], object]
    expected: object


def _shard(shard: int) -> Work:
    rows = rollout_rows(range(2 * shard, 2 * shard + 2))

    def run(store: Store) -> None:
        if find_shard(store, RUN, 0, shard, input_fingerprint="f") is None:
            write_rollouts(store, RUN, 0, shard, 2, rows, input_fingerprint="f", created_by="test")

    def read(store: Store) -> object:
        return read_rollouts(store, RUN, 0, columns=["completion_token_ids"]).to_pydict()["completion_token_ids"]

    expected = [row["completion_token_ids"] for row in rollout_rows(range(4))]
    return Work(run, read, expected)


def _checkpoint(version: int) -> Work:
    def run(store: Store) -> None:
        save_checkpoint(
            store,
            RUN,
            version,
            FILES,
            config_hash="c",
            dataset_fingerprint="d",
            data_position={"index": version},
            rng_files=["rng-0.bin"],
            created_by="test",
        )

    def read(store: Store) -> object:
        found = load_checkpoint(store, RUN, version)
        return found.data_position, {name: read_checkpoint_file(store, found, name) for name in FILES}

    return Work(run, read, ({"index": version}, FILES))


def _policy(version: int) -> Work:
    def run(store: Store) -> None:
        publish_policy(store, RUN, version, policy_files(version), created_by="test")

    def read(store: Store) -> object:
        policy = resolve_policy(store, RUN, version)
        return {part.name: store.read_bytes(part.path) for part in policy.manifest.parts}

    return Work(run, read, policy_files(version))


WORKS = (_shard(0), _shard(1), _checkpoint(1), _policy(1), _checkpoint(2), _policy(2))


def _run_all(store: Store) -> None:
    for work in WORKS:
        work.run(store)


def _num_calls() -> int:
    counting = FaultyStore(open_store(f"memory://{uuid.uuid4().hex}"))
    _run_all(counting)
    return len(counting.calls)


NUM_CALLS = _num_calls()


def _assert_all_or_nothing(store: Store) -> None:
    """Every read gives the whole content, or says that it is not committed (or torn)."""
    for work in WORKS:
        try:
            found = work.read(store)
        except (ObjectMissingError, CorruptObjectError):
            continue
        assert found == work.expected


def _assert_complete(store: Store) -> None:
    assert [work.read(store) for work in WORKS] == [work.expected for work in WORKS]
    ids = read_rollouts(store, RUN, 0, columns=["row_id"])["row_id"].to_pylist()
    assert len(set(ids)) == len(ids) == 8
    assert head_version(store, RUN) == 2
    assert [finding for finding in verify_run(store, RUN).findings if finding.severity is Severity.ERROR] == []


@pytest.mark.parametrize("fault", CRASHES)
@pytest.mark.parametrize("at", range(NUM_CALLS))
def test_iteration_crashed_at_every_call_is_all_or_nothing_and_a_retry_completes(at: int, fault: Fault) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    new_run(store)
    with pytest.raises(Crash):
        _run_all(FaultyStore(store, at, fault))
    _assert_all_or_nothing(store)
    _run_all(store)
    _assert_complete(store)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.lists(
        st.tuples(st.integers(0, NUM_CALLS - 1), st.sampled_from((*CRASHES, Fault.FAIL, Fault.FAIL_AFTER))), max_size=5
    )
)
def test_iteration_crashed_several_times_completes(faults: list[tuple[int, Fault]]) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    new_run(store)
    for at, fault in faults:
        try:
            _run_all(FaultyStore(store, at, fault))
        except (Crash, TransientStorageError):
            _assert_all_or_nothing(store)
    _run_all(store)
    _assert_complete(store)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(at=st.integers(0, NUM_CALLS - 1), fault=st.sampled_from((Fault.FAIL, Fault.FAIL_AFTER)), times=st.integers(1, 4))
def test_transient_failures_of_any_call_are_invisible_behind_the_retrying_store(
    at: int, fault: Fault, times: int
) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    new_run(store)
    waits: list[float] = []
    _run_all(RetryingStore(FaultyStore(store, at, fault, times), RetryPolicy(max_tries=5), waits.append))
    _assert_complete(store)
    assert len(waits) == times


def _artefact_calls() -> list[int]:
    """Calls that write below an artefact folder (single documents are written atomically by contract)."""
    counting = FaultyStore(open_store(f"memory://{uuid.uuid4().hex}"))
    _run_all(counting)
    writes = ("publish", "create")
    return [
        number
        for number, (name, key) in enumerate(counting.calls)
        if name in writes and key.rpartition("/")[2] not in ("head.json", "index.json")
    ]


@pytest.mark.parametrize("at", _artefact_calls())
def test_object_torn_by_a_store_without_atomic_writes_is_never_read_and_is_replaced(at: int) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    new_run(store)
    with pytest.raises(Crash):
        _run_all(FaultyStore(store, at, Fault.TRUNCATE))
    _assert_all_or_nothing(store)
    _run_all(store)
    _assert_complete(store)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(at=st.integers(0, 60), fault=st.sampled_from(CRASHES), passes=st.integers(1, 3))
def test_retention_crashed_at_any_call_never_loses_what_the_rule_keeps(at: int, fault: Fault, passes: int) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    new_run(store)
    for version in range(1, 5):
        _checkpoint(version).run(store)
        _policy(version).run(store)
        write_iteration(store, IterationRecord(run=RUN, iteration=version - 1))
    rule = RetentionRule(keep_newest=2)
    faulty = FaultyStore(store, at, fault)
    try:
        for _ in range(passes):
            apply_retention(faulty, RUN, rule, NOW)
    except Crash:
        pass
    for version in (3, 4):
        assert _policy(version).read(store) == policy_files(version)
        assert _checkpoint(version).read(store) == ({"index": version}, FILES)
    apply_retention(store, RUN, rule, NOW)
    collect_orphans(store, RUN, now=NOW.replace(year=2999), grace_s=0)
    report = verify_run(store, RUN)
    assert report.findings == []
    assert report.num_artefacts == 4
