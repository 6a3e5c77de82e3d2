"""Copies of artefacts in another region: explicit, resumable, proved; exports for other engines."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from storage.errors import CorruptObjectError, ObjectMissingError
from storage.exports import export_rollouts
from storage.layout import manifest_key, shard_folder
from storage.manifest import find_valid
from storage.replication import replicate_artefact, replicate_iteration
from storage.rollouts import read_rollouts, write_family, write_rollouts
from storage.store import open_store
from storage.transfer import Link
from tests.helpers.dict_store import DictStore
from tests.helpers.faulty_store import Crash, FaultyStore
from tests.helpers.storage_builders import RUN, new_run, reward_row, rollout_rows, write_iteration_data

LINK = Link(num_readers=1, range_bytes=2000)
FOLDER = shard_folder(RUN, 0, "rollouts", 0)


@pytest.fixture
def source() -> DictStore:
    store = DictStore("source")
    write_iteration_data(store)
    return store


def test_copy_equals_the_original_and_is_made_once(source: DictStore, tmp_path: Path) -> None:
    target = DictStore("target")
    first = replicate_iteration([source], target, RUN, 0, tmp_path, created_by="copier", link=LINK)
    again = replicate_iteration([source], target, RUN, 0, tmp_path, created_by="copier", link=LINK)
    assert (first.num_copied, again.num_copied, again.num_bytes) == (3, 0, 0)
    assert again.manifests == first.manifests
    assert read_rollouts(target, RUN, 0, families=["reward"]).equals(read_rollouts(source, RUN, 0, families=["reward"]))
    assert list(tmp_path.iterdir()) == []


def test_shards_made_in_several_regions_come_together(tmp_path: Path) -> None:
    regions = [DictStore(name) for name in ("a", "b", "home")]
    for shard, store in ((1, regions[0]), (0, regions[1]), (2, regions[2])):
        rows = rollout_rows(range(2 * shard, 2 * shard + 2))
        write_rollouts(store, RUN, 0, shard, 3, rows, input_fingerprint="f", created_by="t")
    done = replicate_iteration(regions[:2], regions[2], RUN, 0, tmp_path, created_by="t")
    assert (len(done.manifests), done.num_copied) == (3, 2)
    assert read_rollouts(regions[2], RUN, 0).num_rows == 12
    regions[0].delete(manifest_key(shard_folder(RUN, 0, "rollouts", 1)))
    fresh = DictStore("fresh")
    with pytest.raises(ObjectMissingError, match="shard-00001 is complete in none of dict://a, dict://b, dict://home"):
        replicate_iteration(
            regions[:1] + regions[1:2] + [_without(regions[2])], fresh, RUN, 0, tmp_path, created_by="t"
        )


def _without(store: DictStore) -> DictStore:
    copy = DictStore("home")
    copy.objects = {key: data for key, data in store.objects.items() if "shard-00001" not in key}
    return copy


def test_cut_copy_goes_on_and_nothing_partial_is_visible(source: DictStore, tmp_path: Path) -> None:
    target = DictStore("target")
    counting = FaultyStore(source)
    replicate_artefact(counting, DictStore("x"), FOLDER, tmp_path / "x", created_by="t", link=LINK)
    num_reads = sum(name == "read_range" for name, _ in counting.calls)
    assert num_reads > 3
    last = max(n for n, (name, _) in enumerate(counting.calls) if name == "read_range")
    with pytest.raises(Crash):
        replicate_artefact(FaultyStore(source, last), target, FOLDER, tmp_path / "w", created_by="t", link=LINK)
    assert target.objects == {}
    again = FaultyStore(source)
    replicate_artefact(again, target, FOLDER, tmp_path / "w", created_by="t", link=LINK)
    assert sum(name == "read_range" for name, _ in again.calls) == 1
    assert find_valid(target, FOLDER, is_hash_checked=True) is not None


def test_damaged_original_is_never_copied(source: DictStore, tmp_path: Path) -> None:
    key = next(key for key in source.objects if key.startswith(FOLDER) and key.endswith(".parquet"))
    source.objects[key] = source.objects[key][:-1] + b"x"
    target = DictStore("target")
    with pytest.raises(CorruptObjectError, match="its manifest says"):
        replicate_artefact(source, target, FOLDER, tmp_path, created_by="t", link=LINK)
    assert target.objects == {}


def test_export_is_read_by_another_engine_with_hive_partitions(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}-export")
    new_run(store)
    for iteration in (0, 1):
        write_iteration_data(store, iteration)
    write_family(store, RUN, 2, "reward", 0, 1, [reward_row(iteration=2)], input_fingerprint="f", created_by="t")
    write_rollouts(store, RUN, 2, 0, 1, rollout_rows(range(1), 2, 2), input_fingerprint="f", created_by="t")
    target = open_store(str(tmp_path), is_synced=False)

    done = export_rollouts(store, RUN, target)

    assert [(file.iteration, file.rows) for file in done] == [(0, 8), (1, 8), (2, 2)]
    query = f"""SELECT run, iteration, count(*), count(reward), count(DISTINCT row_id)
                FROM read_parquet('{tmp_path}/**/*.parquet', hive_partitioning = true, union_by_name = true)
                GROUP BY ALL ORDER BY iteration"""
    assert duckdb.sql(query).fetchall() == [(RUN, 0, 8, 8, 8), (RUN, 1, 8, 8, 8), (RUN, 2, 2, 1, 2)]
    before = {info.key: target.read_bytes(info.key) for info in target.list("")}
    export_rollouts(store, RUN, target)
    assert {info.key: target.read_bytes(info.key) for info in target.list("")} == before


def test_export_of_nothing_is_an_error(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}-none")
    new_run(store)
    with pytest.raises(ObjectMissingError, match="no committed rollouts of split train to export"):
        export_rollouts(store, RUN, open_store(str(tmp_path)))
