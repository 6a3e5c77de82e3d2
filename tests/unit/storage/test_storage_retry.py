"""The one place that repeats calls."""

from __future__ import annotations

import pytest

from storage.errors import ObjectMissingError, TransientStorageError
from storage.retry import RetryingStore, RetryPolicy
from storage.store import open_store
from tests.helpers.faulty_store import Fault, FaultyStore


def _retrying(at: int | None, fault: Fault, times: int, name: str) -> tuple[RetryingStore, FaultyStore, list[float]]:
    faulty = FaultyStore(open_store(f"memory://retry-{name}", is_retrying=False), at, fault, times)
    waits: list[float] = []
    return RetryingStore(faulty, RetryPolicy(max_tries=4, first_wait_s=1, max_wait_s=3), waits.append), faulty, waits


def test_success_at_once_is_one_call() -> None:
    store, faulty, waits = _retrying(None, Fault.FAIL, 1, "once")
    store.publish("run/a", b"1")
    assert (faulty.calls, waits) == ([("publish", "run/a")], [])


def test_success_after_failures_makes_no_further_call() -> None:
    store, faulty, waits = _retrying(0, Fault.FAIL, 3, "after")
    store.publish("run/a", b"1")
    assert faulty.calls == [("publish", "run/a")] * 4
    assert len(waits) == 3
    assert all(0 <= wait <= 3 for wait in waits)


def test_exhaustion_raises_the_original_error() -> None:
    store, faulty, waits = _retrying(0, Fault.FAIL, 9, "exhausted")
    with pytest.raises(TransientStorageError, match="planned failure of publish run/a"):
        store.publish("run/a", b"1")
    assert (len(faulty.calls), len(waits)) == (4, 3)


def test_lasting_error_is_not_repeated() -> None:
    store, faulty, waits = _retrying(None, Fault.FAIL, 1, "lasting")
    with pytest.raises(ObjectMissingError):
        store.read_bytes("run/none")
    assert (len(faulty.calls), waits) == (1, [])


def test_create_whose_answer_was_lost_is_recognised_as_its_own() -> None:
    store, _, _ = _retrying(0, Fault.FAIL_AFTER, 1, "lost")
    assert store.create("run/a", b"mine") is True
    assert store.create("run/a", b"other") is False
    assert store.read_bytes("run/a") == b"mine"
