"""Attempts at one artefact on a store without conditional create: the first committed manifest stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import fence
from storage.errors import AlreadyPublishedError
from storage.layout import policy_folder
from storage.manifest import Manifest, PartSource, commit, find_valid, load_manifest
from storage.store import Store
from tests.helpers.dict_store import DictStore
from tests.helpers.fast_fence import fast_fence
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.interleaved import run_interleaved

FOLDER = policy_folder("r", 1)


def attempt(store: Store, name: str, content: str = "same", inputs: str = "i") -> Manifest:
    return commit(
        store, FOLDER, {"x": PartSource(content.encode())}, kind="policy", input_fingerprint=inputs, created_by=name,
        attempt=name,
    )  # fmt: skip


class Seconds:
    """A clock that moves when all who still work have slept: one that the schedule holds up is slow, not dead."""

    def __init__(self, works: int) -> None:
        self._left, self._slept, self._now = works, set[int](), 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, _: float) -> None:
        self._slept.add(threading.get_ident())
        if len(self._slept) >= self._left:
            self._now += 1.0
            self._slept.clear()

    def done(self) -> None:
        self._left -= 1
        self._slept.discard(threading.get_ident())


@settings(max_examples=200, deadline=None)
@given(
    choices=st.lists(st.integers(0, 2), max_size=60), contents=st.lists(st.sampled_from("abc"), min_size=2, max_size=3)
)
def test_what_the_first_attempt_reports_stays_whatever_the_others_do(choices: list[int], contents: list[str]) -> None:
    store, clock = DictStore("s", is_conditional=False), Seconds(len(contents))
    reported: list[Manifest] = []

    def work(number: int, content: str) -> Callable[[Store], None]:
        def run(own: Store) -> None:
            try:
                found = attempt(own, f"a{number}x", content)
                assert reported == [] or found == reported[0]
                reported.append(found)
            except AlreadyPublishedError:
                assert find_valid(store, FOLDER, input_fingerprint="i") is not None
            finally:
                clock.done()

        return run

    with patch.object(fence, "now", clock.now), patch.object(fence, "sleep", clock.sleep):
        run_interleaved(store, [work(*pair) for pair in enumerate(contents)], choices)
    assert load_manifest(store, FOLDER) == reported[0]
    assert find_valid(store, FOLDER, is_hash_checked=True) is not None


@pytest.fixture
def fast() -> Iterator[None]:
    with fast_fence():
        yield


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.CRASH_AFTER])
@pytest.mark.parametrize("at", range(11))
def test_attempt_that_died_in_the_fence_only_costs_its_wait(fault: Fault, at: int) -> None:
    store = DictStore("s", is_conditional=False)
    with pytest.raises(Crash):
        attempt(FaultyStore(store, at, fault), "dead")
    standing = find_valid(store, FOLDER)
    found = attempt(store, "alive")
    assert found == load_manifest(store, FOLDER)
    assert standing in (None, found)


@pytest.mark.usefixtures("fast")
def test_nobody_waits_without_company() -> None:
    store = DictStore("s", is_conditional=False)
    with patch.object(fence, "sleep", side_effect=AssertionError("waited")):
        attempt(store, "one")
        attempt(store, "two", "other", inputs="j")
    assert load_manifest(store, FOLDER).attempt == "two"
    assert [key for key in store.objects if "/fence/" in key] == []


@pytest.mark.usefixtures("fast")
def test_store_that_decides_itself_needs_no_fence() -> None:
    store = FaultyStore(DictStore("s"))
    attempt(store, "one")
    assert [key for _, key in store.calls if "/fence/" in key] == []
