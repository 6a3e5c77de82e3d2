"""Rewinds: the future of a version is set aside, kept, and never mixed with what is made anew."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from storage import layout
from storage.checkpoints import load_checkpoint, read_index, save_checkpoint
from storage.errors import ObjectMissingError, PolicyVersionError
from storage.iterations import find_iterations
from storage.manifest import find_valid, read_part
from storage.parquet_io import encode_table
from storage.parsed_keys import Kind, parse_key
from storage.policies import head_version, publish_policy, read_head
from storage.retention import RetentionRule, apply_retention, collect_orphans
from storage.rollout_schema import prompt_id, row_id, sample_seed
from storage.rollouts import read_rollouts, write_rollouts
from storage.runs import IterationRecord, write_iteration
from storage.scores import ScoresRecord, claim_scores
from storage.store import Store, open_store
from storage.superseded import (
    lineage_of_iteration,
    lineage_of_version,
    rewind,
    superseded_manifests,
    superseded_parts,
)
from storage.verify import Severity, verify_run
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN, new_run, policy_files, rollout_rows, write_iteration_data


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three iterations: versions 0 to 3, each with a resume point, rollouts, rewards and a record."""
    made = open_store(str(tmp_path), is_synced=False)
    new_run(made)
    for version in range(4):
        publish_policy(made, RUN, version, policy_files(version), created_by="test")
        save_checkpoint(
            made, RUN, version, {"opt.bin": b"x", "rng.bin": b"r"}, config_hash="c", dataset_fingerprint="d",
            data_position={}, rng_files=["rng.bin"], created_by="test",
        )  # fmt: skip
    for k in range(3):
        write_iteration_data(made, k)
        write_iteration(made, IterationRecord(run=RUN, iteration=k))
    return made


def go_back(store: Store, version: int) -> None:
    rewind(store, [], RUN, version, reason="reward collapsed", at=NOW)


def test_future_leaves_every_view_and_the_past_stays(store: Store) -> None:
    go_back(store, 1)
    head = read_head(store, RUN)
    assert head is not None
    assert (head.version, [(r.from_version, r.to_version, r.reason) for r in head.rollbacks]) == (
        1, [(3, 1, "reward collapsed")],
    )  # fmt: skip
    assert find_iterations(store, RUN) == [0]
    assert read_index(store, RUN) == (0, 1)
    assert load_checkpoint(store, RUN).version == 1
    assert find_valid(store, layout.policy_folder(RUN, 2)) is None
    assert len(read_rollouts(store, RUN, 0)) == 8
    with pytest.raises(ObjectMissingError):
        read_rollouts(store, RUN, 1)


def test_scores_by_other_rewards_go_with_what_they_score(store: Store) -> None:
    folders = {split: layout.rescored_folder(RUN, "strict", split) for split in ("train", "eval")}
    keys = {
        (split, k): f"{folder}/{layout.partition_folder(RUN, k)}/rescored.parquet"
        for split, folder in folders.items()
        for k in range(3)
    }
    for key in keys.values():
        store.publish(key, encode_table(pa.table({"reward": [1.0]})))
    claim_scores(store, folders["train"], ScoresRecord(run=RUN, split=layout.Split.TRAIN, rewards={"terms": []}))
    go_back(store, 1)
    # Version 1 stays, and with it its evaluation; iteration 1 is made anew.
    left = {place for place, key in keys.items() if store.exists(key)}
    assert left == {("train", 0), ("eval", 0), ("eval", 1)}
    aside = layout.superseded(RUN, 1, keys["train", 2].removeprefix(f"{RUN}/"))
    assert store.exists(aside)
    assert verify_run(store, RUN).findings == []


def test_set_aside_data_is_kept_bit_for_bit_and_verified(store: Store) -> None:
    before = {part.path: store.read_bytes(part.path) for v in (2, 3) for part in _policy_parts(store, v)}
    go_back(store, 1)
    kept = [m for m in superseded_manifests(store, RUN) if m.kind == "policy"]
    assert sorted(m.policy_versions for m in kept) == [(2,), (3,)]
    assert {part.path: read_part(store, part) for m in kept for part in m.parts} == before
    report = verify_run(store, RUN)
    assert report.is_good
    assert [f for f in report.findings if f.severity is Severity.WARNING] == []  # nothing looks uncommitted
    store.delete(next(iter(before)))
    assert not verify_run(store, RUN).is_good


def _policy_parts(store: Store, version: int) -> list:
    manifest = find_valid(store, layout.policy_folder(RUN, version))
    assert manifest is not None
    return list(manifest.parts)


def test_rows_made_anew_have_other_ids_and_seeds_and_the_old_ones_keep_theirs(store: Store) -> None:
    old = read_rollouts(store, RUN, 1, columns=["row_id"]).column("row_id").to_pylist()
    go_back(store, 1)
    lineage = lineage_of_iteration(read_head(store, RUN), 1)
    write_rollouts(
        store, RUN, 1, 0, 1, rollout_rows(range(4), iteration=1), input_fingerprint="g", created_by="t",
        lineage=lineage,
    )  # fmt: skip
    new = read_rollouts(store, RUN, 1, columns=["row_id"]).column("row_id").to_pylist()
    assert (lineage, len(new), len(old)) == (1, 8, 8)
    assert set(new).isdisjoint(old)
    name = prompt_id("arithmetic", 0)
    assert row_id(RUN, 1, name, 0) == row_id(RUN, 1, name, 0, lineage=0) != row_id(RUN, 1, name, 0, lineage=1)
    assert sample_seed(7, 1, name, 0) != sample_seed(7, 1, name, 0, lineage=1)


def test_lineage_counts_how_often_an_iteration_was_set_aside(store: Store) -> None:
    go_back(store, 2)
    publish_policy(store, RUN, 3, policy_files(30), created_by="test")
    go_back(store, 1)
    head = read_head(store, RUN)
    assert [lineage_of_iteration(head, k) for k in range(4)] == [0, 1, 2, 2]
    assert [lineage_of_version(head, v) for v in range(4)] == [0, 0, 1, 2]
    numbers = [parse_key(m.key).number for m in superseded_manifests(store, RUN) if m.kind == "policy"]
    assert sorted(numbers) == [2, 3, 3]  # both versions 3 are kept


@pytest.mark.parametrize("version", [3, 4])
def test_rewind_that_goes_nowhere_is_refused(store: Store, version: int) -> None:
    with pytest.raises(PolicyVersionError, match=r"is the head already|is no earlier version"):
        go_back(store, version)
    assert head_version(store, RUN) == 3


def test_rewind_to_a_version_that_is_not_kept_changes_nothing(store: Store) -> None:
    store.delete(layout.manifest_key(layout.policy_folder(RUN, 1)))
    with pytest.raises(ObjectMissingError):
        go_back(store, 1)
    assert head_version(store, RUN) == 3
    assert find_iterations(store, RUN) == [0, 1, 2]


@pytest.mark.parametrize("after", range(0, 60, 7))
def test_rewind_that_died_anywhere_is_finished_by_repeating_it(store: Store, after: int) -> None:
    faulty = FaultyStore(store, at=after, fault=Fault.CRASH_AFTER)
    try:
        rewind(faulty, [], RUN, 1, reason="x", at=NOW)
    except Crash:
        go_back(store, 1)
    head = read_head(store, RUN)
    assert head is not None
    assert (head.version, len(head.rollbacks)) == (1, 1)
    assert find_iterations(store, RUN) == [0]
    assert len([m for m in superseded_manifests(store, RUN) if m.kind == "policy"]) == 2
    assert verify_run(store, RUN).is_good


def test_repeated_rewind_leaves_alone_what_was_made_since(store: Store) -> None:
    go_back(store, 1)
    write_rollouts(store, RUN, 1, 0, 2, rollout_rows(range(2), iteration=1), input_fingerprint="g", created_by="t",
                   lineage=1)  # fmt: skip
    go_back(store, 1)
    assert find_valid(store, layout.shard_folder(RUN, 1, "rollouts", 0), input_fingerprint="g") is not None
    head = read_head(store, RUN)
    assert head is not None
    assert len(head.rollbacks) == 1


def test_retention_and_orphan_collection_spare_what_was_set_aside(store: Store) -> None:
    go_back(store, 1)
    kept = superseded_parts(store, RUN)
    for version in (2, 3, 4):
        publish_policy(store, RUN, version, policy_files(version + 40), created_by="test")
        write_iteration(store, IterationRecord(run=RUN, iteration=version - 1))
    assert layout.policy_folder(RUN, 2) in apply_retention(store, RUN, RetentionRule(keep_newest=1), NOW).deleted
    collect_orphans(store, RUN, now=NOW + timedelta(days=40_000), grace_s=0)
    assert all(store.exists(path) for path in kept)


def test_keys_of_what_was_set_aside_are_part_of_the_layout() -> None:
    key = layout.superseded(RUN, 1, "policies/4/manifest.json")
    parsed = parse_key(key)
    assert (parsed.kind, parsed.number, parsed.name) == (Kind.SUPERSEDED, 1, "policies/4/manifest.json")
