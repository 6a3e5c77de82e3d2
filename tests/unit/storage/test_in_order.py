"""Work on several threads: results in order, slots never shared, few things under way, errors where they belong."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from storage.in_order import InOrder


@pytest.mark.parametrize("processors", [1, 2, 16])
def test_results_come_in_the_order_of_the_things(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    lengths = random.Random(0)

    def late(number: int, slot: int) -> tuple[int, int]:
        time.sleep(lengths.random() / 500)
        return number, slot

    with InOrder(late) as work:
        found = list(work.results(range(100)))
        assert [number for number, _ in found] == list(range(100))
        assert {slot for _, slot in found} == set(range(work.num_slots))


def test_slot_of_a_result_in_use_is_given_to_nobody() -> None:
    running, lock = list[int](), threading.Lock()

    def write(number: int, slot: int) -> int:
        with lock:
            assert slot not in running
            running.append(slot)
        memory[slot] = number
        return slot

    with InOrder(write) as work:
        memory = [-1] * work.num_slots
        for number, slot in enumerate(work.results(range(200))):
            assert memory[slot] == number
            with lock:
                running.remove(slot)


def test_things_are_taken_only_as_they_are_needed() -> None:
    taken = 0

    def things() -> Iterator[int]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield number

    with InOrder(lambda number, _: number) as work:
        results = work.results(things())
        for expected in range(20):
            assert next(results) == expected
            assert taken <= expected + work.num_slots + 1


def test_error_comes_in_its_turn_and_ends_the_work() -> None:
    begun = list[int]()

    def fail(number: int, _: int) -> int:
        begun.append(number)
        if number == 7:
            raise ValueError("planned")
        return number

    found = list[int]()
    with pytest.raises(ValueError, match="planned"), InOrder(fail) as work:
        found.extend(work.results(range(1000)))
    assert found == list(range(7))
    assert len(begun) <= 8 + work.num_slots


def test_leaving_early_waits_for_what_runs_and_drops_the_rest() -> None:
    ended = list[int]()

    def slow(number: int, _: int) -> int:
        time.sleep(0.01)
        ended.append(number)
        return number

    with InOrder(slow) as work:
        assert next(work.results(range(1000))) == 0
    after = len(ended)
    time.sleep(0.05)
    assert len(ended) == after <= work.num_slots + 1
