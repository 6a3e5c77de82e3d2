"""`motley verify`: every kind of damage is a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.checkpoints import save_checkpoint
from storage.errors import ObjectMissingError
from storage.parsed_keys import parse_key
from storage.policies import publish_policy, resolve_policy
from storage.rollouts import shard_manifests, write_family, write_rollouts
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from storage.verify import Severity, verify_run
from tests.helpers.dict_store import DictStore
from tests.helpers.storage_builders import RUN, new_run, policy_files, reward_row, rollout_rows, write_iteration_data


class CountingStore(DictStore):
    """A store over a link: counts the bytes that cross, by key."""

    def __init__(self) -> None:
        super().__init__("far")
        self.crossed: Counter[str] = Counter()

    def read_bytes(self, key: str) -> bytes:
        data = super().read_bytes(key)
        self.crossed[key] += len(data)
        return data

    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = super().read_bytes(key)[start : start + length]
        self.crossed[key] += len(data)
        return data


@pytest.fixture(params=["files", "over a link"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    store: Any = open_store(str(tmp_path), is_synced=False) if request.param == "files" else CountingStore()
    return filled(store)


def filled(store: Store) -> Store:
    """Write a run with something of everything."""
    new_run(store)
    write_iteration_data(store)
    publish_policy(store, RUN, 0, policy_files(), created_by="test")
    write_iteration(store, IterationRecord(run=RUN, iteration=0))
    save_checkpoint(
        store,
        RUN,
        1,
        {"rng.bin": b"r"},
        config_hash="c",
        dataset_fingerprint="d",
        data_position={},
        rng_files=["rng.bin"],
        created_by="test",
    )
    return store


def _part(store: Store, shard: int = 0) -> str:
    return shard_manifests(store, RUN, 0)[shard].parts[0].path


def _flip(store: Store) -> None:
    data = bytearray(store.read_bytes(_part(store)))
    data[len(data) // 3] ^= 1
    store.publish(_part(store), bytes(data))


def _double_rows(store: Store) -> None:
    rows = rollout_rows(range(1, 3))
    write_rollouts(store, RUN, 0, 1, 2, rows, input_fingerprint="g", created_by="test")


def _lose_rewards(store: Store) -> None:
    write_family(store, RUN, 0, "reward", 0, 1, [reward_row()], input_fingerprint="g", created_by="test")


def _wrong_head(store: Store) -> None:
    data = store.read_bytes(f"{RUN}/policies/head.json").replace(b'"version": 0', b'"version": 7')
    store.publish(f"{RUN}/policies/head.json", data)


DAMAGES: dict[str, tuple[Callable[[Store], object], str]] = {
    "flipped byte": (_flip, "has SHA-256"),
    "zero bytes": (lambda store: store.publish(_part(store), b""), "has 0 bytes, its manifest says"),
    "part gone": (lambda store: store.delete(_part(store)), "is missing"),
    "shard gone": (
        lambda store: store.delete(shard_manifests(store, RUN, 0)[1].key),
        "shards 1 of 2 are not committed",
    ),
    "torn manifest": (
        lambda store: store.publish(resolve_policy(store, RUN).manifest.key, b'{"format"'),
        "no complete JSON document",
    ),
    "rows doubled": (_double_rows, "2 row ids of rollouts occur twice"),
    "rewards lost": (_lose_rewards, "family reward lacks 7 rows"),
    "head of nothing": (_wrong_head, "there is no such object"),
    "torn record": (lambda store: store.publish(f"{RUN}/iterations/0/record.json", b"{"), "no complete JSON"),
    "run record gone": (lambda store: store.delete(f"{RUN}/run.json"), "the run record is missing"),
    "plan of another kind": (
        lambda store: store.publish(f"{RUN}/plans/0.json", b'{"format": "motley.job/1"}'),
        "field format is 'motley.job/1'",
    ),
}


def test_good_run_has_no_findings_and_progress_reaches_the_end(store: Store) -> None:
    calls: list[tuple[int, int]] = []
    report = verify_run(store, RUN, progress=lambda done, total, _: calls.append((done, total)))
    assert (report.findings, report.is_good) == ([], True)
    assert (report.num_artefacts, report.num_parts, report.num_documents) == (5, 6, 4)
    assert report.size_bytes == sum(info.size for info in store.list("") if parse_key(info.key).is_data)
    assert [done for done, _ in calls] == list(range(calls[-1][1] + 1))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(store: Store, damage: str) -> None:
    act, fault = DAMAGES[damage]
    act(store)
    report = verify_run(store, RUN)
    errors = [finding.message for finding in report.findings if finding.severity is Severity.ERROR]
    assert any(fault in message for message in errors), errors
    assert report.is_good is False


def test_without_hashes_a_flipped_byte_in_text_may_pass_but_a_lost_part_may_not(store: Store) -> None:
    store.delete(_part(store))
    assert verify_run(store, RUN, is_hash_checked=False).is_good is False


def test_leftovers_are_warnings(store: Store) -> None:
    dead = f"{RUN}/policies/1/a0dead/model.safetensors"
    store.publish(dead, b"half")
    store.publish(f"{RUN}/notes.txt", b"mine")
    store.publish(f"{RUN}/policies/.tmp-1", b"")
    report = verify_run(store, RUN)
    assert report.is_good is True
    assert {finding.key: finding.message for finding in report.findings} == {
        dead: "belongs to an attempt that never committed, or that a later one replaced",
        f"{RUN}/notes.txt": "is none of the layout",
        f"{RUN}/policies/.tmp-1": "is a temporary file of a writer that died or is writing now",
    }


def test_unknown_run_is_an_error(store: Store) -> None:
    with pytest.raises(ObjectMissingError, match="has nothing of run 'nope'"):
        verify_run(store, "nope")


def test_rows_cross_a_link_once_to_be_hashed_and_read_and_once_for_their_ids() -> None:
    """Found in a run over two regions: every file of rows was read whole a dozen times."""
    store = CountingStore()
    filled(store)
    parts = [part for shard in shard_manifests(store, RUN, 0) for part in shard.parts]
    store.crossed.clear()
    assert verify_run(store, RUN).is_good
    for part in parts:  # so small that a reader of one column buffers the file, and its first bytes once more
        assert part.size <= store.crossed[part.path] <= 3 * part.size
    store.crossed.clear()
    assert verify_run(store, RUN, is_hash_checked=False).is_good
