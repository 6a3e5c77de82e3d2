"""Parallel ranged reads: bounded, resumed at the range reached, with a deadline that names the peer."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from storage.errors import CorruptObjectError, ObjectMissingError, TransferDeadlineError, TransientStorageError
from storage.manifest import Part
from storage.retry import RetryingStore
from storage.store import Store, open_store
from storage.transfer import Link, fetch_part
from tests.helpers.faulty_store import Crash, Fault, FaultyStore

DATA = bytes(range(256)) * 40 + b"end"
KEY = "run/object"
LINK = Link(num_readers=3, range_bytes=1000)


@pytest.fixture
def store() -> Store:
    opened = open_store(f"memory://{threading.get_ident()}-transfer")
    opened.publish(KEY, DATA)
    return opened


def part(data: bytes = DATA) -> Part:
    return Part(name="object", path=KEY, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_object_arrives_whole_and_leaves_no_journal(store: Store, tmp_path: Path) -> None:
    counting = FaultyStore(store)
    assert fetch_part(counting, part(), tmp_path / "a" / "x", LINK) == len(DATA)
    assert (tmp_path / "a" / "x").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]
    assert len(counting.calls) == 11


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.CRASH])
@pytest.mark.parametrize("at", [1, 5, 10])
def test_cut_transfer_goes_on_with_what_is_missing(store: Store, tmp_path: Path, fault: Fault, at: int) -> None:
    link = Link(num_readers=1, range_bytes=1000)
    with pytest.raises((TransientStorageError, Crash)):
        fetch_part(FaultyStore(store, at, fault), part(), tmp_path / "x", link)
    assert not (tmp_path / "x").exists()
    counting = FaultyStore(store)
    read = fetch_part(counting, part(), tmp_path / "x", link)
    assert len(counting.calls) == 11 - at
    assert read == len(DATA) - 1000 * at
    assert (tmp_path / "x").read_bytes() == DATA


def test_transient_failures_are_repeated_in_one_place(store: Store, tmp_path: Path) -> None:
    waits: list[float] = []
    faulty = RetryingStore(FaultyStore(store, 2, Fault.FAIL, 2), sleep=waits.append)
    fetch_part(faulty, part(), tmp_path / "x", LINK)
    assert (tmp_path / "x").read_bytes() == DATA
    assert len(waits) == 2


@pytest.mark.parametrize("damaged", [DATA[:-1], DATA[:-1] + b"x"])
def test_damaged_object_is_refused_and_nothing_is_kept(store: Store, tmp_path: Path, damaged: bytes) -> None:
    store.publish(KEY, damaged)
    with pytest.raises(CorruptObjectError):
        fetch_part(store, part(), tmp_path / "x", LINK)
    assert list(tmp_path.iterdir()) == []


def test_bad_bytes_of_an_earlier_call_are_read_again(store: Store, tmp_path: Path) -> None:
    link = Link(num_readers=1, range_bytes=1000)
    with pytest.raises(Crash):
        fetch_part(FaultyStore(store, 4), part(), tmp_path / "x", link)
    (partial,) = tmp_path.glob(".x.arriving-*/partial")
    with partial.open("r+b") as file:
        file.write(b"damage")
    assert fetch_part(store, part(), tmp_path / "x", link) == len(DATA)
    assert (tmp_path / "x").read_bytes() == DATA


def test_journal_of_another_object_is_not_believed(store: Store, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        fetch_part(FaultyStore(store, 4), part(), tmp_path / "x", Link(num_readers=1, range_bytes=1000))
    other = bytes(len(DATA))
    store.publish(KEY, other)
    fetch_part(store, part(other), tmp_path / "x", LINK)
    assert (tmp_path / "x").read_bytes() == other


def test_missing_object_is_typed(store: Store, tmp_path: Path) -> None:
    store.delete(KEY)
    with pytest.raises(ObjectMissingError):
        fetch_part(store, part(), tmp_path / "x", LINK)


def test_w1_w12_deadline_names_the_peer_and_what_arrived(store: Store, tmp_path: Path) -> None:
    """W1, W12: a transfer that hangs ends with an error that says where and how far."""
    hang = threading.Event()

    class Hanging(FaultyStore):
        def read_range(self, key: str, start: int, length: int) -> bytes:
            if start >= 3000:
                hang.wait(60)
            return super().read_range(key, start, length)

    clock = iter([0.0] * 5 + [100.0] * 100)
    link = Link(num_readers=1, range_bytes=1000, ends_at=0.05, now=lambda: next(clock))
    try:
        with pytest.raises(TransferDeadlineError, match=r"memory://.*/run/object took too long: \d+ of 10243 bytes"):
            fetch_part(Hanging(store), part(), tmp_path / "x", link)
    finally:
        hang.set()


def test_empty_object_is_an_object(store: Store, tmp_path: Path) -> None:
    store.publish(KEY, b"")
    assert fetch_part(store, part(b""), tmp_path / "x", LINK) == 0
    assert (tmp_path / "x").read_bytes() == b""


@pytest.mark.parametrize("num_readers", [1, 3])
def test_bytes_are_proved_in_whatever_order_they_arrive(store: Store, tmp_path: Path, num_readers: int) -> None:
    """The first range comes last: what is hashed while the rest arrives is never taken out of order."""
    last = threading.Event()

    class FirstIsLast(FaultyStore):
        def read_range(self, key: str, start: int, length: int) -> bytes:
            if start == 0 and num_readers > 1:
                last.wait(30)
            data = super().read_range(key, start, length)
            if start == len(DATA) // 1000 * 1000:
                last.set()
            return data

    fetch_part(FirstIsLast(store), part(), tmp_path / "x", Link(num_readers=num_readers, range_bytes=1000))
    assert (tmp_path / "x").read_bytes() == DATA
