"""Versions brought to a machine and into a region: by deltas where that is sure, whole on any doubt."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from storage.errors import (
    CorruptObjectError,
    DeltaMismatchError,
    ObjectMissingError,
    PermissionDeniedError,
    StoreFullError,
    TransientStorageError,
)
from storage.layout import manifest_key, policy_folder
from storage.manifest import Part, find_valid
from storage.policies import DELTA_PART, LocalPolicy, Policy, publish_policy, resolve_policy
from storage.policy_copies import bases_needed, find_copy, publish_copy, send_file
from storage.policy_deltas import delta_file, open_delta
from storage.policy_fetch import FetchedPolicy, fetch_policy, find_chain, local_policy_folder
from storage.retention import RetentionRule, apply_retention
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from storage.transfer import Link
from tests.helpers.dict_store import DictStore
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN


def files_of(version: int) -> dict[str, bytes]:
    """A policy of a few kilobytes of which 1 % changes per version; the template changes at version 3."""
    values = np.random.default_rng(0).standard_normal(3000).astype(np.float16)
    for step in range(1, version + 1):
        values.view(np.uint16)[step::101] += np.uint16(1)
    template = b"old" if version < 3 else b"new"
    return {"model.safetensors": save({"w": values}), "config.json": b"{}", "template.jinja": template}


@pytest.fixture
def home(tmp_path: Path) -> Store:
    """Versions 0 to 4, each but 0 with a delta."""
    store = open_store(str(tmp_path / "home"), is_synced=False)
    base = None
    for version in range(5):
        base = in_place(store, publish_policy(store, RUN, version, files_of(version), created_by="t", base=base))
    return store


@pytest.fixture
def region(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "region"), is_synced=False)


def in_place(store: Store, policy: Policy) -> LocalPolicy:
    folder = local_policy_folder(store, policy)
    assert folder is not None
    return LocalPolicy(policy, folder)


def content(folder: Path) -> Mapping[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetch(
    home: Store, version: int, folder: Path, *bases: LocalPolicy, stores: list[Store] | None = None
) -> FetchedPolicy:
    return fetch_policy(stores or [home], resolve_policy(home, RUN, version), folder / str(version), bases)


def copy(home: Store, region: Store, version: int, work: Path, *, is_anchor: bool) -> Policy:
    """Do what stage weight_sync does."""
    policy = resolve_policy(home, RUN, version)
    local = fetch(home, version, work).local
    open_delta(home, policy, work)
    delta = delta_file(policy, work)
    base = None if is_anchor else resolve_policy(region, RUN, version - 1)
    return publish_copy(region, local, policy, delta=delta, base=base, created_by="t")


def test_version_is_made_from_the_one_before(home: Store, tmp_path: Path) -> None:
    base = fetch(home, 1, tmp_path).local
    found = fetch(home, 2, tmp_path, base)
    assert (found.form, found.doubts) == ("deltas", ())
    assert content(found.local.folder) == files_of(2)
    assert found.num_bytes == resolve_policy(home, RUN, 2).manifest.part(DELTA_PART).size < found.local.policy.size / 5


def test_chain_of_versions_brings_files_that_changed_on_the_way(home: Store, tmp_path: Path) -> None:
    found = fetch(home, 4, tmp_path, fetch(home, 1, tmp_path).local)
    assert found.form == "deltas"
    assert content(found.local.folder) == files_of(4)


def test_without_a_base_the_whole_version_is_fetched(home: Store, tmp_path: Path) -> None:
    found = fetch(home, 4, tmp_path)
    assert (found.form, found.num_bytes) == ("whole", found.local.policy.size)
    assert "has no delta" in found.doubts[0]
    assert content(found.local.folder) == files_of(4)


def test_w13_any_damage_of_base_or_delta_ends_in_the_whole_version(home: Store, tmp_path: Path) -> None:
    """W13: base version, per-tensor checksum, never bad weights."""
    base = fetch(home, 1, tmp_path).local
    good = (base.folder / "model.safetensors").read_bytes()
    for name in ("base", "delta"):
        part = resolve_policy(home, RUN, 2).manifest.part(DELTA_PART)
        delta = home.read_bytes(part.path)
        if name == "base":
            (base.folder / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        else:
            home.publish(part.path, delta[:-1] + bytes([delta[-1] ^ 1]))
        found = fetch(home, 2, tmp_path / name, base)
        assert found.form == "whole"
        assert len(found.doubts) == 1
        assert content(found.local.folder) == files_of(2)
        (base.folder / "model.safetensors").write_bytes(good)
        home.publish(part.path, delta)


def test_w14_missing_delta_in_a_chain_ends_in_the_whole_version(home: Store, tmp_path: Path) -> None:
    """W14: a delta of the chain is gone, or retention took a version in between."""
    base = fetch(home, 1, tmp_path).local
    home.delete(manifest_key(policy_folder(RUN, 3)))
    found = fetch(home, 4, tmp_path, base)
    assert found.form == "whole"
    assert content(found.local.folder) == files_of(4)


def test_chain_from_a_version_that_was_made_anew_is_refused(home: Store, tmp_path: Path) -> None:
    base = fetch(home, 1, tmp_path).local
    other = LocalPolicy(
        Policy(RUN, 1, "f" * 64, base.policy.manifest, base.policy.files, base.policy.delta), base.folder
    )
    assert fetch(home, 2, tmp_path, other).form == "whole"
    with pytest.raises(DeltaMismatchError, match="has no delta"):
        find_chain(home, resolve_policy(home, RUN, 2), [other])


def test_version_damaged_everywhere_is_an_error_and_leaves_nothing(home: Store, tmp_path: Path) -> None:
    part = resolve_policy(home, RUN, 0).manifest.part("model.safetensors")
    home.publish(part.path, home.read_bytes(part.path)[:-1])
    with pytest.raises(CorruptObjectError, match=r"model\.safetensors has .* bytes"):
        fetch(home, 0, tmp_path)
    assert not (tmp_path / "0").exists()
    assert list(tmp_path.glob(".0.*")) == []


def test_publisher_makes_the_same_content_with_and_without_a_delta(tmp_path: Path) -> None:
    """A retry whose base is gone agrees with the first attempt."""
    first, second = (open_store(str(tmp_path / name), is_synced=False) for name in ("a", "b"))
    base = in_place(first, publish_policy(first, RUN, 0, files_of(0), created_by="t"))
    with_delta = publish_policy(first, RUN, 1, files_of(1), created_by="t", base=base)
    assert publish_policy(first, RUN, 1, files_of(1), created_by="t") == with_delta
    assert publish_policy(second, RUN, 1, files_of(1), created_by="t").manifest.content_digest == (
        with_delta.manifest.content_digest
    )


def test_region_holds_anchors_and_deltas_and_serves_every_version(home: Store, region: Store, tmp_path: Path) -> None:
    copies = [copy(home, region, version, tmp_path, is_anchor=version == 1) for version in range(1, 5)]
    assert [policy.is_whole for policy in copies] == [True, False, False, False]
    assert {part.name for part in copies[1].manifest.parts} == {DELTA_PART}
    assert {part.name for part in copies[2].manifest.parts} == {DELTA_PART, "template.jinja"}
    assert bases_needed(region, RUN, [4]) == {1, 2, 3}
    for version in range(1, 5):
        policy = resolve_policy(home, RUN, version)
        assert find_copy(region, policy) is not None
        assert copies[version - 1].manifest.content_digest == policy.manifest.content_digest
        found = fetch(home, version, tmp_path / "machine", stores=[region])
        assert content(found.local.folder) == files_of(version)
        assert found.form == ("whole" if version == 1 else "deltas")


def test_what_retention_reads_badly_in_a_region_costs_no_copy_its_base(home: Store, tmp_path: Path) -> None:
    region, rule = DictStore("region"), RetentionRule(keep_newest=2, keep_always=())
    for version in range(1, 5):
        copy(home, region, version, tmp_path, is_anchor=version == 1)
        write_iteration(home, IterationRecord(run=RUN, iteration=version - 1))
    counting, objects = FaultyStore(region), dict(region.objects)
    apply_retention(home, RUN, rule, NOW, copies=[counting])
    assert set(bases_needed(region, RUN, [3, 4])) == {1, 2, 3}
    for at in range(len(counting.calls)):
        region.objects = dict(objects)
        with suppress(TransientStorageError, CorruptObjectError):
            apply_retention(home, RUN, rule, NOW, copies=[FaultyStore(region, at, Fault.SHORT)])
        for version in (3, 4):
            assert find_copy(region, resolve_policy(home, RUN, version)) is not None, at


def test_copy_whose_base_is_gone_is_replaced_by_a_whole_one(home: Store, region: Store, tmp_path: Path) -> None:
    for version in (1, 2):
        copy(home, region, version, tmp_path, is_anchor=version == 1)
    region.delete(manifest_key(policy_folder(RUN, 1)))
    wanted = resolve_policy(home, RUN, 2)
    assert find_copy(region, wanted) is None
    assert fetch(home, 2, tmp_path / "machine", stores=[region, home]).form == "whole"
    assert copy(home, region, 2, tmp_path, is_anchor=True).is_whole
    assert find_valid(region, policy_folder(RUN, 2), is_hash_checked=True) is not None


def test_copy_of_other_weights_is_not_taken(home: Store, region: Store, tmp_path: Path) -> None:
    publish_policy(region, RUN, 2, files_of(1), created_by="t")
    assert find_copy(region, resolve_policy(home, RUN, 2)) is None
    found = fetch(home, 2, tmp_path, stores=[region, home])
    assert content(found.local.folder) == files_of(2)
    with pytest.raises(CorruptObjectError, match="has other weights than version 2 has at home"):
        fetch(home, 2, tmp_path / "x", stores=[region])


def test_nothing_to_fetch_from_is_an_error(home: Store, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissingError, match="no store to fetch it from"):
        fetch_policy([], resolve_policy(home, RUN, 2), tmp_path / "x")


def test_files_of_a_whole_version_go_on_into_the_region_while_the_next_one_arrives(tmp_path: Path) -> None:
    far, region, is_sent = DictStore("far"), FaultyStore(DictStore("region")), threading.Event()
    publish_policy(far, RUN, 0, files_of(0), created_by="t")
    wanted = resolve_policy(far, RUN, 0)

    class LastComesLate(FaultyStore):
        """Gives nothing of the last file before the one before is in the region."""

        def read_range(self, key: str, start: int, length: int) -> bytes:
            assert not key.endswith("template.jinja") or is_sent.wait(60)
            return super().read_range(key, start, length)

    def pass_on(part: Part, path: Path) -> None:
        send_file(region, wanted, part, path, "a1")
        assert find_copy(region, wanted) is None  # nobody sees a version before its last file is proved
        sent.add(part.name)
        if part.name == "model.safetensors":
            is_sent.set()

    sent: set[str] = set()
    found = fetch_policy([LastComesLate(far)], wanted, tmp_path / "0", proved=pass_on)
    assert (found.form, sent) == ("whole", set(files_of(0)))
    publish_copy(region, found.local, wanted, delta=None, base=None, created_by="t", attempt="a1", sent=sent)
    assert [name for name, _ in region.calls].count("publish_file") == len(sent)
    assert find_valid(region, policy_folder(RUN, 0), is_hash_checked=True) is not None
    assert content(fetch(region, 0, tmp_path / "machine").local.folder) == files_of(0)


def test_region_that_takes_no_file_stops_the_fetch(tmp_path: Path) -> None:
    far = DictStore("far")
    publish_policy(far, RUN, 0, files_of(0), created_by="t")

    def refused(part: Part, path: Path) -> None:
        raise PermissionDeniedError("no")

    with pytest.raises(PermissionDeniedError):
        fetch_policy([far], resolve_policy(far, RUN, 0), tmp_path / "0", proved=refused)
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota")])
def test_full_disk_of_this_machine_is_typed_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    far = DictStore("far")
    publish_policy(far, RUN, 0, files_of(0), created_by="t")

    def full(*_: object) -> int:
        raise error

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreFullError, match=rf"cannot write file://{tmp_path}.*no space left; free some"):
        fetch_policy([far], resolve_policy(far, RUN, 0), tmp_path / "0")
    assert not (tmp_path / "0").exists()


def test_killed_fetch_of_a_whole_version_goes_on(tmp_path: Path) -> None:
    """What a dead process left is taken over; files that were complete are not read again."""
    far = DictStore("far")
    publish_policy(far, RUN, 0, files_of(0), created_by="t")
    link = Link(num_readers=1, range_bytes=1000)
    with pytest.raises(Crash):
        fetch_policy([FaultyStore(far, 6)], resolve_policy(far, RUN, 0), tmp_path / "0", link=link)
    (left,) = tmp_path.glob(".0.arriving-*")
    left.rename(tmp_path / ".0.arriving-999999999-x")
    counting = FaultyStore(far)
    found = fetch_policy([counting], resolve_policy(far, RUN, 0), tmp_path / "0", link=link)
    assert content(found.local.folder) == files_of(0)
    reads = [name for name, _ in counting.calls if name == "read_range"]
    assert 0 < len(reads) < 1 + len(files_of(0)["model.safetensors"]) / 1000
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
