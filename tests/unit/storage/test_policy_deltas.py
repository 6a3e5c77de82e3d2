"""A delta is applied while it arrives; what comes out is proved, and so is the delta, before anybody sees it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from storage import delta_apply
from storage.errors import TransferDeadlineError
from storage.policies import DELTA_PART, LocalPolicy, Policy, publish_policy, resolve_policy
from storage.policy_fetch import fetch_policy
from storage.transfer import Link
from storage.weight_delta import encode_delta
from tests.helpers.dict_store import DictStore
from tests.helpers.faulty_store import Crash, FaultyStore
from tests.helpers.storage_builders import RUN

LINK = Link(num_readers=1, range_bytes=500)


def files_of(version: int) -> dict[str, bytes]:
    """Random changes of a third of the weights: a delta of many small blocks."""
    values = np.random.default_rng(0).standard_normal(6000).astype(np.float32)
    for step in range(1, version + 1):
        values.view(np.uint32)[step::3] += np.random.default_rng(step).integers(0, 99, 2000, np.uint32)[
            : len(values[step::3])
        ]
    return {"config.json": b"{}", "model.safetensors": save({f"w{i}": values[1000 * i :][:1000] for i in range(6)})}


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictStore:
    """Versions 0 to 2 in a remote store, with deltas of blocks of two kilobytes; version 0 is on this machine."""
    monkeypatch.setattr("storage.weight_delta.encode_delta", lambda *a, **k: encode_delta(*a, **k, block_bytes=2048))
    store, base = DictStore("far"), None
    for version in range(3):
        policy = publish_policy(store, RUN, version, files_of(version), created_by="t", base=base)
        folder = tmp_path / f"made-{version}"
        folder.mkdir()
        for name, data in files_of(version).items():
            (folder / name).write_bytes(data)
        base = LocalPolicy(policy, folder)
    return store


def _base(far: DictStore, folder: Path) -> LocalPolicy:
    return LocalPolicy(resolve_policy(far, RUN, 0), folder / "made-0")


def _delta(far: DictStore, version: int) -> tuple[Policy, str, int]:
    policy = resolve_policy(far, RUN, version)
    part = policy.manifest.part(DELTA_PART)
    return policy, part.path, part.size


class EndComesLate(FaultyStore):
    """Gives the end of an object only when an event has happened."""

    def __init__(self, store: DictStore, key: str, end: int, event: threading.Event) -> None:
        super().__init__(store)
        self._wanted, self._end, self._event = key, end, event

    def read_range(self, key: str, start: int, length: int) -> bytes:
        if key == self._wanted and start + length >= self._end:
            assert self._event.wait(60)
        return super().read_range(key, start, length)


@pytest.mark.parametrize("version", [1, 2])
def test_delta_is_applied_before_its_end_is_here(
    far: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    policy, key, size = _delta(far, version)
    is_begun, apply = threading.Event(), delta_apply.apply_block

    def begin(*arguments: Any) -> None:
        is_begun.set()
        apply(*arguments)

    monkeypatch.setattr(delta_apply, "apply_block", begin)
    late = EndComesLate(far, key, size, is_begun)
    found = fetch_policy([late], policy, tmp_path / "x", [_base(far, tmp_path)], link=LINK)
    assert (found.form, found.doubts) == ("deltas", ())
    assert {path.name: path.read_bytes() for path in found.local.folder.iterdir()} == files_of(version)


def test_version_is_not_here_before_all_of_its_delta_is(far: DictStore, tmp_path: Path) -> None:
    policy, _, size = _delta(far, 1)
    seen: list[bool] = []

    class Looking(FaultyStore):
        def read_range(self, key_: str, start: int, length: int) -> bytes:
            seen.append((tmp_path / "x").exists())
            return super().read_range(key_, start, length)

    fetch_policy([Looking(far)], policy, tmp_path / "x", [_base(far, tmp_path)], link=LINK)
    assert len(seen) >= size / 500
    assert not any(seen)


@pytest.mark.parametrize("place", [3, 30, 2000, -1])
def test_damaged_delta_ends_in_the_whole_version(far: DictStore, tmp_path: Path, place: int) -> None:
    policy, key, _ = _delta(far, 1)
    data = bytearray(far.objects[key])
    data[place] ^= 1
    far.objects[key] = bytes(data)
    found = fetch_policy([far], policy, tmp_path / "x", [_base(far, tmp_path)], link=LINK)
    assert (found.form, len(found.doubts)) == ("whole", 1)
    assert {path.name: path.read_bytes() for path in found.local.folder.iterdir()} == files_of(1)


@pytest.mark.parametrize("damage", [0, 20, 1200])
def test_bad_bytes_of_an_earlier_try_are_read_and_applied_again(far: DictStore, tmp_path: Path, damage: int) -> None:
    policy, key, _ = _delta(far, 1)

    class Dying(FaultyStore):
        def read_range(self, key_: str, start: int, length: int) -> bytes:
            if key_ == key and start >= 2000:
                raise Crash("planned")
            return super().read_range(key_, start, length)

    deltas = tmp_path / "deltas"
    with pytest.raises(Crash):
        fetch_policy([Dying(far)], policy, tmp_path / "x", [_base(far, tmp_path)], deltas=deltas, link=LINK)
    (partial,) = deltas.glob(".*.arriving-*/partial")
    with partial.open("r+b") as file:
        file.seek(damage)
        file.write(b"\xff\x00\xff")
    found = fetch_policy([far], policy, tmp_path / "x", [_base(far, tmp_path)], deltas=deltas, link=LINK)
    assert (found.form, found.doubts) == ("deltas", ())
    assert {path.name: path.read_bytes() for path in found.local.folder.iterdir()} == files_of(1)


def test_deadline_of_the_link_is_why_a_delta_does_not_come(far: DictStore, tmp_path: Path) -> None:
    policy, key, size = _delta(far, 1)
    never = threading.Event()
    late = EndComesLate(far, key, size, never)
    times = iter([0.0] * 6 + [9.0] * 1000)
    link = Link(num_readers=1, range_bytes=500, ends_at=0.05, now=lambda: next(times))
    try:
        with pytest.raises(TransferDeadlineError, match=rf"dict://far/{key} took too long"):
            fetch_policy([late], policy, tmp_path / "x", [_base(far, tmp_path)], link=link)
    finally:
        never.set()
    assert not (tmp_path / "x").exists()
