"""Old rollouts go by a rule, whole and in every region, and whoever asks for them is told."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from storage.errors import InvalidInputError, ObjectMissingError, StorageError
from storage.layout import Split
from storage.leases import take_lease
from storage.parsed_keys import Kind, parse_key
from storage.policies import publish_policy
from storage.removed_rollouts import forget_removals, read_removals, removal_sentence
from storage.rollout_retention import OldRollouts, RolloutRule, old_rollouts, remove_rollouts
from storage.rollouts import read_rollouts, write_rollouts
from storage.runs import IterationRecord, write_iteration
from storage.sql import connect
from storage.store import Store, open_store
from storage.superseded import rewind
from storage.verify import verify_run
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN, new_run, policy_files, rollout_rows, write_iteration_data

NEWEST_TWO = RolloutRule(keep_iterations=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Five committed iterations, one a day, the last one ended at NOW; the first has an evaluation."""
    made = open_store(str(tmp_path / "home"), is_synced=False)
    new_run(made)
    publish_policy(made, RUN, 0, policy_files(0), created_by="t")
    for k in range(5):
        write_iteration_data(made, k)
        publish_policy(made, RUN, k + 1, policy_files(k + 1), created_by="t")
        write_iteration(made, IterationRecord(run=RUN, iteration=k, ended_at=NOW - timedelta(days=4 - k)))
    rows = rollout_rows(range(2))
    write_rollouts(made, RUN, 0, 0, 1, rows, input_fingerprint="f", created_by="t", split=Split.EVAL)
    return made


def old(store: Store, rule: RolloutRule = NEWEST_TWO, needed: tuple[int, ...] = ()) -> list[OldRollouts]:
    return old_rollouts([store], RUN, rule, NOW, iterations=range(9), needed=needed)


def prune(store: Store, rule: RolloutRule = NEWEST_TWO) -> list[int]:
    return [entry.iteration for entry in remove_rollouts([store], RUN, rule, NOW, old(store, rule))]


def with_rows(store: Store) -> list[int]:
    """Iterations that have any object of the training split."""
    keys = [parse_key(info.key) for info in store.list(f"{RUN}/iterations")]
    return sorted({k.number or 0 for k in keys if k.kind is Kind.SHARD and k.split is Split.TRAIN})


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        (RolloutRule(keep_iterations=2), [0, 1, 2]),
        (RolloutRule(keep_iterations=9), []),
        (RolloutRule(keep_days=1.5), [0, 1, 2]),
        (RolloutRule(keep_days=0.0), [0, 1, 2, 3]),  # the newest always stays
        (RolloutRule(keep_iterations=3, keep_days=3.5), [0]),
        (RolloutRule(keep_iterations=4, keep_days=1.5), [0]),
    ],
)
def test_iteration_stays_as_long_as_either_bound_keeps_it(store: Store, rule: RolloutRule, gone: list[int]) -> None:
    assert [entry.iteration for entry in old(store, rule)] == gone
    assert with_rows(store) == list(range(5))  # asking removes nothing
    assert prune(store, rule) == gone
    assert with_rows(store) == [k for k in range(5) if k not in gone]
    assert prune(store, rule) == []


def test_records_and_evaluations_stay_and_the_run_is_good(store: Store) -> None:
    before = {entry.iteration: entry for entry in old(store)}
    assert (before[0].rows, before[0].size_bytes > 0) == (8, True)
    prune(store)
    assert verify_run(store, RUN).findings == []
    assert read_rollouts(store, RUN, 0, split=Split.EVAL).num_rows == 4
    with connect(store, RUN) as connection:
        query = "SELECT DISTINCT iteration FROM rollouts WHERE split = 'train' ORDER BY 1"
        assert connection.sql(query).fetchall() == [(3,), (4,)]


def test_reader_of_removed_rows_is_told_when_and_why(store: Store) -> None:
    prune(store)
    said = (
        r"rollouts of iteration 1 of run run-1 \(8 rows\) were removed on 2026-01-02 03:04 UTC, since the newest 2 it"
    )
    with pytest.raises(ObjectMissingError, match=said):
        read_rollouts(store, RUN, 1)
    assert removal_sentence(store, RUN, 3) is None


def test_waiting_groups_and_iterations_in_use_stay(store: Store) -> None:
    take_lease(store, RUN, "reader", expires_at=NOW + timedelta(minutes=1), iterations=[1])
    found = old(store, needed=(2,))
    assert [(entry.iteration, entry.why_kept) for entry in found] == [
        (0, None), (1, "a stage uses it"), (2, "its groups wait in the buffer of a resume point"),
    ]  # fmt: skip
    assert [entry.iteration for entry in remove_rollouts([store], RUN, NEWEST_TWO, NOW, found)] == [0]
    assert read_rollouts(store, RUN, 1).num_rows == read_rollouts(store, RUN, 2).num_rows == 8


def test_lease_that_comes_between_the_look_and_the_note_is_seen(store: Store) -> None:
    found = old(store)
    take_lease(store, RUN, "reader", expires_at=NOW + timedelta(minutes=1), iterations=[1])
    assert [entry.iteration for entry in remove_rollouts([store], RUN, NEWEST_TWO, NOW, found)] == [0, 2]
    assert read_rollouts(store, RUN, 1).num_rows == 8
    assert sorted(read_removals(store, RUN)) == [0, 2]


def test_iterations_that_are_not_committed_or_not_reported_stay(store: Store) -> None:
    write_iteration_data(store, 5)
    write_iteration(store, IterationRecord(run=RUN, iteration=5, ended_at=NOW - timedelta(days=99)))
    store.delete(f"{RUN}/iterations/1/record.json")
    assert prune(store) == [0, 2]
    assert with_rows(store) == [1, 3, 4, 5]


def test_rows_go_in_every_region(store: Store, tmp_path: Path) -> None:
    other = open_store(str(tmp_path / "other"), is_synced=False)
    write_iteration_data(other, 0)
    found = old_rollouts([store, other], RUN, NEWEST_TWO, NOW, iterations=range(9), needed=())
    assert [(entry.iteration, entry.rows) for entry in found] == [(0, 16), (1, 8), (2, 8)]
    remove_rollouts([store, other], RUN, NEWEST_TWO, NOW, found)
    assert (with_rows(store), with_rows(other)) == ([3, 4], [])
    with pytest.raises(ObjectMissingError, match="were removed on"):
        read_rollouts(other, RUN, 0)


def test_pass_that_dies_anywhere_is_taken_up(store: Store) -> None:
    """At every call: nothing that stays is touched, no reader is misled, and the next pass ends it."""
    kept = {k: read_rollouts(store, RUN, k) for k in (3, 4)}
    counted = FaultyStore(store)
    found = old(store)
    for at in range(0, 400, 5):
        dying = FaultyStore(store, at, Fault.CRASH)
        with suppress(Crash):
            remove_rollouts([dying], RUN, NEWEST_TWO, NOW, found)
            break
        for k in (0, 1, 2):
            with suppress(ObjectMissingError):
                assert read_rollouts(store, RUN, k).num_rows == 8
    else:
        pytest.fail(f"the pass never ended: {len(counted.calls)} calls")
    prune(store)
    assert with_rows(store) == [3, 4]
    assert all(read_rollouts(store, RUN, k).equals(table) for k, table in kept.items())
    assert all(removal.is_complete and removal.rows == 8 for removal in read_removals(store, RUN).values())


def test_rewind_forgets_what_is_made_anew_and_keeps_what_it_set_aside(store: Store) -> None:
    rewind(store, [], RUN, 3, reason="r", at=NOW)
    aside = {info.key for info in store.list(f"{RUN}/iterations/3") if info.key.endswith(".parquet")}
    for k in (3, 4, 5):
        write_iteration_data(store, k)
        publish_policy(store, RUN, k + 1, policy_files(k + 9), created_by="t")
        write_iteration(store, IterationRecord(run=RUN, iteration=k, ended_at=NOW))
    assert prune(store) == [0, 1, 2, 3]
    assert aside <= {info.key for info in store.list(f"{RUN}/iterations/3")}
    rewind(store, [], RUN, 2, reason="r", at=NOW)
    assert sorted(read_removals(store, RUN)) == [0, 1]


def test_nothing_to_forget_is_no_error(store: Store) -> None:
    forget_removals(store, RUN, 0)
    prune(store)
    forget_removals(store, RUN, 0)
    assert read_removals(store, RUN) == {}


def test_unreadable_note_stops_the_pass(store: Store) -> None:
    store.publish(f"{RUN}/removed.json", b"{")
    with pytest.raises(StorageError, match=r"removed\.json"):
        old(store)
    assert with_rows(store) == list(range(5))


@pytest.mark.parametrize("bounds", [{}, {"keep_iterations": 0}, {"keep_iterations": -1}, {"keep_days": -1.0}])
def test_rule_without_a_sound_bound_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="rule for rollouts"):
        RolloutRule(**bounds)
