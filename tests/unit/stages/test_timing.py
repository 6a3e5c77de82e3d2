from __future__ import annotations

from threading import Thread

import pytest

from stages.errors import DeadlineError
from stages.timing import Clock, Deadline, PhaseTimer


class Ticks:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.s = 0.0

    def clock(self) -> Clock:
        return Clock(now=lambda: self.s, monotonic=lambda: self.s)


def test_phases_add_up_and_name_what_was_running() -> None:
    ticks = Ticks()
    timer = PhaseTimer(clock=ticks.clock())

    for _ in range(2):
        with timer.phase("a"):
            ticks.s += 1.0
            with timer.phase("b"):
                ticks.s += 0.5
    with pytest.raises(KeyError), timer.phase("c"):
        raise KeyError("x")

    assert timer.phases_s == {"a": 3.0, "b": 1.0, "c": 0.0}
    assert timer.current == "c"


def test_phases_of_worker_threads_belong_to_the_main_thread_s_phase() -> None:
    timer = PhaseTimer(clock=Ticks().clock())

    def work() -> None:
        with timer.phase("inner"):
            pass

    with timer.phase("outer"):
        thread = Thread(target=work)
        thread.start()
        thread.join()

    assert list(timer.phases_s) == ["outer"]


def test_deadline_names_who_was_waited_for() -> None:
    ticks = Ticks()
    deadline = Deadline(clock=ticks.clock(), ends_at=5.0)

    assert deadline.remaining_s("the engine") == 5.0
    ticks.s = 7.0
    with pytest.raises(DeadlineError, match="passed 2 s ago while it waited for the engine"):
        deadline.remaining_s("the engine")
