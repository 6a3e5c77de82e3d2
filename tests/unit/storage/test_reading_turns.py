"""Turns at a region's store: few at once, in the plan's order, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from storage.documents import model_bytes
from storage.layout import reader_turn
from storage.reading_turns import WAITING_COUNTS_S, Reader, ReadingTurns
from tests.helpers.dict_store import DictStore

ORDER = ("m0", "m1", "m2", "m3")


def turns(store: DictStore, machine: str, at_once: int, **changes: Any) -> ReadingTurns:
    given: dict[str, Any] = {"sleep": lambda _: time.sleep(0.002), **changes}
    return ReadingTurns(
        store=store, run="r", machine=machine, order=ORDER, at_once=at_once, reading_counts_s=60.0, **given
    )


def says(store: DictStore, machine: str, state: Any, at: float) -> None:
    key = reader_turn("r", machine)
    expires_at = datetime.fromtimestamp(at, UTC)
    store.publish(key, model_bytes(Reader(machine=machine, state=state, expires_at=expires_at), key))


def never() -> float:
    return 1.0


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_machines_than_allowed_read_at_the_same_time(at_once: int) -> None:
    store, lock = DictStore("s"), threading.Lock()
    reading, most, done = 0, 0, list[str]()
    begin = threading.Event()
    # One machine reads already, so the others meet while they wait.
    says(store, "m0", "reading", time.time() + 60)

    def read(machine: str) -> None:
        nonlocal reading, most
        with turns(store, machine, at_once).turn(never):
            with lock:
                reading += 1
                most = max(most, reading + (not begin.is_set()))
            time.sleep(0.02)
            with lock:
                reading -= 1
                done.append(machine)

    threads = [threading.Thread(target=read, args=(machine,)) for machine in ORDER[1:]]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    begin.set()
    store.delete(reader_turn("r", "m0"))
    for thread in threads:
        thread.join(30)
    assert sorted(done) == list(ORDER[1:])
    assert most <= at_once
    assert not list(store.list("r/readers"))


def waited(store: DictStore, machine: str, at_once: int, until: Callable[[int], None]) -> int:
    """Return how often a machine looked before its turn; `until` is told each time."""
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        until(looks)

    with turns(store, machine, at_once, sleep=sleep, now=lambda: 1000.0).turn(never):
        return looks


def test_machine_waits_for_those_before_it_and_for_nobody_behind() -> None:
    store = DictStore("s")
    says(store, "m3", "waiting", 1001.0)
    assert waited(store, "m1", 1, lambda _: None) == 0
    says(store, "m0", "waiting", 1001.0)
    assert waited(store, "m1", 1, lambda _: store.delete(reader_turn("r", "m0"))) == 1


def test_reader_behind_in_the_order_is_not_interrupted() -> None:
    store = DictStore("s")
    says(store, "m3", "reading", 1001.0)
    assert waited(store, "m0", 2, lambda _: None) == 0
    assert waited(store, "m0", 1, lambda _: store.delete(reader_turn("r", "m3"))) == 1


@pytest.mark.parametrize("state", ["waiting", "reading"])
def test_what_a_dead_machine_said_ends_by_itself(state: str) -> None:
    store = DictStore("s")
    says(store, "m0", state, 999.0)
    assert waited(store, "m1", 1, lambda _: None) == 0


def test_machines_that_say_nothing_or_nonsense_hold_nobody_up() -> None:
    store = DictStore("s")
    store.publish(reader_turn("r", "m0"), b"nonsense")
    assert waited(store, "m3", 1, lambda _: None) == 0


def test_deadline_ends_the_wait_and_the_turn_is_given_back() -> None:
    store = DictStore("s")
    says(store, "m0", "reading", 1001.0)

    def none_left() -> float:
        raise TimeoutError("planned")

    with pytest.raises(TimeoutError), turns(store, "m1", 1, now=lambda: 1000.0).turn(none_left):
        pass
    assert not store.exists(reader_turn("r", "m1"))


def test_failed_read_gives_the_turn_back() -> None:
    store = DictStore("s")
    with pytest.raises(ValueError, match="planned"), turns(store, "m1", 1).turn(never):
        raise ValueError("planned")
    assert not store.exists(reader_turn("r", "m1"))


def test_waiting_counts_longer_than_the_pause_between_two_looks() -> None:
    from storage.reading_turns import POLL_S

    assert WAITING_COUNTS_S >= 10 * POLL_S
