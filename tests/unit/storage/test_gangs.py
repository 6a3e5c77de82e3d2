"""What is left of the gangs of committed iterations: nothing, unless one of their attempts lives."""

from __future__ import annotations

from datetime import timedelta

import pytest

from storage.errors import CorruptObjectError
from storage.gangs import GangMember, begin_epoch, join_epoch, read_members, remove_gangs
from storage.layout import gang_member, gangs_folder
from storage.leases import release_lease, take_lease
from storage.policies import head_version, publish_policy
from tests.helpers.dict_store import DictStore
from tests.helpers.storage_builders import NOW, RUN, policy_files

TASK = "actor_training"
MACHINES = ("m0", "m/1")


@pytest.fixture
def store() -> DictStore:
    """Iterations 0 to 2 with two epochs each; versions 0 to 2 are committed, so iteration 2 is not."""
    store = DictStore("home")
    for iteration in range(3):
        for epoch in range(2):
            begin_epoch(store, RUN, iteration, TASK, epoch, MACHINES)
            for machine in MACHINES:
                member = GangMember(
                    machine=machine, attempt=f"{machine}-{iteration}-{epoch}", inputs="i", address="127.0.0.1", port=1
                )
                assert join_epoch(store, RUN, iteration, TASK, epoch, member)
    for version in range(3):
        publish_policy(store, RUN, version, policy_files(version), created_by="test")
    assert head_version(store, RUN) == 2
    return store


def documents(store: DictStore, iteration: int) -> int:
    return len(list(store.list(gangs_folder(RUN, iteration))))


def test_gangs_of_committed_iterations_go_and_others_stay(store):
    deleted = remove_gangs(store, RUN, range(3), NOW)
    assert len(deleted) == 2 * 2 * (1 + len(MACHINES))
    assert [documents(store, iteration) for iteration in range(3)] == [0, 0, 6]
    assert sorted(read_members(store, RUN, 2, TASK, 1, MACHINES)) == sorted(MACHINES)
    assert remove_gangs(store, RUN, range(3), NOW) == []


def test_only_the_iterations_that_were_asked_for_are_looked_at(store):
    remove_gangs(store, RUN, [1], NOW)
    assert [documents(store, iteration) for iteration in range(3)] == [6, 0, 6]


def test_a_gang_stays_while_an_attempt_of_it_lives(store):
    take_lease(store, RUN, "late", expires_at=NOW + timedelta(hours=1), attempts=["m/1-0-1"])
    remove_gangs(store, RUN, range(3), NOW)
    assert [documents(store, iteration) for iteration in range(3)] == [6, 0, 6]
    release_lease(store, RUN, "late")
    remove_gangs(store, RUN, range(3), NOW)
    assert documents(store, 0) == 0


def test_nothing_goes_before_the_first_commit():
    store = DictStore("home")
    begin_epoch(store, RUN, 0, TASK, 0, MACHINES)
    assert remove_gangs(store, RUN, [0], NOW) == []
    assert documents(store, 0) == 1


def test_a_member_that_cannot_be_read_is_named_and_its_gang_stays(store):
    key = gang_member(RUN, 0, TASK, 0, "m0")
    store.publish(key, b"{")
    with pytest.raises(CorruptObjectError, match="m0"):
        remove_gangs(store, RUN, [0], NOW)
    assert documents(store, 0) == 6
