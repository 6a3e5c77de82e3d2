"""The fan-out inside a region: expected values are worked out by hand."""

from __future__ import annotations

import pytest

from plans.cost.fan_out import cheapest_fan_out

FAST = dict.fromkeys("abcd", 10.0)


def test_equal_machines_read_shared() -> None:
    """Four read 100 bytes each at 40 bytes/s together: 10 s either way, and nobody gains by being first."""
    found = cheapest_fan_out(dict.fromkeys("abcd", 5.0), FAST, 40.0, 100.0)
    assert (found.order, found.at_once) == (("a", "b", "c", "d"), 4)
    assert found.read_s == pytest.approx(10.0)


def test_machine_that_generates_longest_reads_first_and_alone() -> None:
    """The store gives 10 bytes/s, as one link takes: in turn c is done after 10 + 60, d after 40 + 5, so 70 s end it;
    shared all have the weights after 40 s and c ends after 100 s."""
    found = cheapest_fan_out({"a": 10.0, "b": 20.0, "c": 60.0, "d": 5.0}, FAST, 10.0, 100.0)
    assert (found.order, found.at_once) == (("c", "b", "a", "d"), 1)
    assert found.read_s == pytest.approx(10.0)


def test_as_many_read_at_once_as_fill_the_store() -> None:
    """The store gives two links' worth. Two at once: 10 s a wave, ends 10 + 50 = 60 s; all: 20 s, ends 70 s; one at a
    time: the fourth has the weights after 40 s and ends after 65 s."""
    found = cheapest_fan_out({"a": 50.0, "b": 50.0, "c": 25.0, "d": 25.0}, FAST, 20.0, 100.0)
    assert (found.order, found.at_once) == (("a", "b", "c", "d"), 2)


def test_store_that_outdoes_all_links_is_read_shared() -> None:
    found = cheapest_fan_out({"a": 1.0, "b": 99.0}, {"a": 1.0, "b": 10.0}, 1000.0, 100.0)
    assert (found.order, found.at_once) == (("b", "a"), 2)
    assert found.read_s == pytest.approx(100.0)  # a's own link
