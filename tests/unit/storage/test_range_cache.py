"""Ranged reads of other regions are cached by block; only data objects, and only good blocks."""

from __future__ import annotations

from pathlib import Path

from storage.layout import shard_folder
from storage.parquet_io import read_table
from storage.range_cache import BLOCK_BYTES, CachingStore
from storage.rollout_schema import Family
from storage.rollouts import shard_manifests
from tests.helpers.dict_store import DictStore
from tests.helpers.faulty_store import FaultyStore
from tests.helpers.storage_builders import RUN, write_iteration_data

KEY = f"{shard_folder(RUN, 0, 'rollouts', 0)}/a1/rows.parquet"


def _reads(store: FaultyStore) -> int:
    return sum(name == "read_range" for name, _ in store.calls)


def test_any_range_is_the_objects_own_and_is_read_once(tmp_path: Path) -> None:
    far = DictStore("far")
    data = bytes(range(256)) * (BLOCK_BYTES // 100)
    far.publish(KEY, data)
    counting = FaultyStore(far)
    ranges = [(0, 10), (5, 10), (BLOCK_BYTES - 3, 7), (BLOCK_BYTES, BLOCK_BYTES + 9), (len(data) - 4, 100), (7, 0)]
    for _ in range(2):
        cached = CachingStore(counting, tmp_path)
        for start, length in ranges:
            assert cached.read_range(KEY, start, length) == data[start : start + length]
    assert _reads(counting) == 3


def test_columns_are_read_through_the_cache(tmp_path: Path) -> None:
    far = DictStore("far")
    write_iteration_data(far)
    counting = FaultyStore(far)
    part = shard_manifests(far, RUN, 0)[0].parts[0]
    first = read_table(CachingStore(counting, tmp_path), part, Family.ROLLOUTS, ["prompt_id"])  # type: ignore[arg-type]
    before = _reads(counting)
    again = read_table(CachingStore(counting, tmp_path), part, Family.ROLLOUTS, ["prompt_id"])  # type: ignore[arg-type]
    assert again.equals(first)
    assert _reads(counting) == before > 0


def test_damaged_block_is_read_again(tmp_path: Path) -> None:
    far = DictStore("far")
    far.publish(KEY, b"0123456789")
    assert CachingStore(far, tmp_path).read_range(KEY, 0, 10) == b"0123456789"
    (block,) = tmp_path.glob("*/*")
    block.write_bytes(block.read_bytes()[:-1] + b"x")
    assert CachingStore(far, tmp_path).read_range(KEY, 0, 10) == b"0123456789"


def test_manifests_are_never_cached(tmp_path: Path) -> None:
    far = DictStore("far")
    key = f"{shard_folder(RUN, 0, 'rollouts', 0)}/manifest.json"
    for content in (b"one", b"two"):
        far.publish(key, content)
        assert CachingStore(far, tmp_path).read_range(key, 0, 3) == content
    assert list(tmp_path.iterdir()) == []


def test_oldest_blocks_go_when_the_cache_is_too_large(tmp_path: Path) -> None:
    far = DictStore("far")
    for number in range(3):
        far.publish(f"{KEY}.{number}", bytes(1000))
        CachingStore(far, tmp_path).read_range(f"{KEY}.{number}", 0, 10)
    CachingStore(far, tmp_path, max_bytes=1500)
    assert len(list(tmp_path.glob("*/*"))) == 1
