"""A limit on what moves over a link: whatever a store does counts, whoever of the process does it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from storage.manifest import Part
from storage.rate_limit import RateLimitedStore, RateLimiter
from storage.store import Store
from storage.transfer import Link, fetch_part
from tests.helpers.dict_store import DictStore

DATA = bytes(range(100))


class Waits:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def limiter(self, bytes_per_s: float) -> RateLimiter:
        return RateLimiter(bytes_per_s, now=lambda: self.now, sleep=self.sleep)


def limited(waits: Waits) -> Store:
    store = DictStore("far")
    store.publish("r/object", DATA)
    return cast("Store", RateLimitedStore(store, waits.limiter(100.0)))


def test_bytes_go_through_at_the_mean_rate() -> None:
    waits = Waits()
    limiter = waits.limiter(100.0)
    for _ in range(4):
        limiter.take(50)
    assert waits.now == 1.5  # the fifth one would start at 2 s


ACTIONS: list[Callable[[Store, Path], object]] = [
    lambda store, _: store.read_bytes("r/object"),
    lambda store, _: store.read_range("r/object", 0, 100),
    lambda store, path: store.download("r/object", path / "x"),
    lambda store, _: store.open_input("r/object").read(),
    lambda store, _: store.publish("r/new", DATA),
    lambda store, path: store.publish_file("r/new", _file(path)),
    lambda store, _: store.create("r/other", DATA),
]


@pytest.mark.parametrize("number", range(len(ACTIONS)))
def test_every_way_to_move_an_object_counts(tmp_path: Path, number: int) -> None:
    waits = Waits()
    store = limited(waits)
    ACTIONS[number](store, tmp_path)
    store.read_range("r/object", 0, 1)
    assert waits.now == 1.0


def test_questions_cost_nothing() -> None:
    waits = Waits()
    store = limited(waits)
    for _ in range(5):
        assert (store.size("r/object"), store.exists("r/object"), len([*store.list("r")])) == (100, True, 1)
    assert waits.now == 0.0


def test_transfer_stays_below_the_limit(tmp_path: Path) -> None:
    waits = Waits()
    part = Part(name="o", path="r/object", size=100, sha256=hashlib.sha256(DATA).hexdigest())
    fetch_part(limited(waits), part, tmp_path / "x", Link(num_readers=1, range_bytes=10))
    assert (tmp_path / "x").read_bytes() == DATA
    assert waits.now == pytest.approx(0.9)


def _file(folder: Path) -> Path:
    (folder / "source").write_bytes(DATA)
    return folder / "source"
