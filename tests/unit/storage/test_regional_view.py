"""A run whose rows lie in two regions' stores is read and verified as one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.runs import ResolvedRun
from storage.errors import ObjectMissingError, StoreAccessError
from storage.layout import manifest_key, shard_folder
from storage.regional_view import RegionalView, run_stores, view_of
from storage.rollouts import read_rollouts, write_rollouts
from storage.sql import connect
from storage.store import Store, open_store
from storage.verify import verify_run
from tests.helpers.stage_contexts import make_run
from tests.helpers.storage_builders import rollout_rows


@pytest.fixture
def run(tmp_path: Path) -> ResolvedRun:
    """Make a run of regions a and b; shard 0 lies in a, shard 1 in b."""
    made = make_run(tmp_path)
    for shard, root in enumerate(made.roots.values()):
        rows = [{**row, "run": "r"} for row in rollout_rows(range(2 * shard, 2 * shard + 2))]
        write_rollouts(open_store(root), "r", 0, shard, 2, rows, input_fingerprint="f", created_by="t")
    return made


@pytest.fixture
def stores(run: ResolvedRun) -> list[Store]:
    return run_stores(open_store(run.home_root), "r")


def test_all_rows_are_read_in_order_from_wherever_they_lie(stores: list[Store]) -> None:
    assert len(stores) == 2
    with pytest.raises(ObjectMissingError, match="shards 1 of 2 are not committed"):
        read_rollouts(stores[0], "r", 0)
    view = view_of(stores)
    assert read_rollouts(view, "r", 0).column("prompt_index").to_pylist() == sorted([*range(4)] * 2)
    with connect(view, "r") as sql:
        assert sql.sql("SELECT count(DISTINCT row_id) FROM rollouts").fetchall() == [(8,)]
    keys = [info.key for info in view.list("r/iterations")]
    assert keys == sorted({info.key for store in stores for info in store.list("r/iterations")})


def test_run_is_whole_over_all_regions_and_not_without_a_shard_of_one(stores: list[Store]) -> None:
    assert [verify_run(store, "r").is_good for store in stores] == [False, False]
    assert verify_run(stores[0], "r", others=stores[1:]).findings == []
    assert verify_run(stores[1], "r", others=stores[:1]).findings == []
    assert stores[1].delete(manifest_key(shard_folder("r", 0, "rollouts", 1)))
    assert not verify_run(stores[0], "r", others=stores[1:]).is_good


def test_command_verifies_every_store_from_any_of_them(run: ResolvedRun, stores: list[Store], tmp_path: Path) -> None:
    def verified(root: str) -> tuple[int, dict[str, object]]:
        command = [sys.executable, "-m", "cli", "verify", f"{root}/r", "--json"]
        environment = {**os.environ, "MOTLEY_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout)

    code, document = verified(run.roots["b"])
    assert (code, document["is_good"], document["objects"]) == (0, True, 2)
    assert document["stores"] == [stores[1].url, stores[0].url]
    part = next(info.key for info in stores[1].list("r/iterations") if info.key.endswith(".parquet"))
    stores[1].publish(part, b"")
    code, document = verified(run.roots["a"])
    assert (code, document["is_good"]) == (1, False)
    assert any(f"{stores[1].url}/r/" in str(finding) for finding in document["findings"])


def test_copy_that_lies_elsewhere_stands_by_itself(run: ResolvedRun, tmp_path: Path) -> None:
    shutil.copytree(run.roots["a"], tmp_path / "copy")
    copy = open_store(str(tmp_path / "copy"))
    assert run_stores(copy, "r") == [copy]
    assert view_of([copy]) is copy


def test_objects_of_the_first_store_come_first_and_missing_ones_are_errors(tmp_path: Path) -> None:
    near, far = (open_store(str(tmp_path / name)) for name in ("near", "far"))
    near.publish("r/both", b"near")
    far.publish("r/both", b"far")
    far.publish("r/far", b"0123")
    view = RegionalView([near, far])
    assert (view.read_bytes("r/both"), view.read_range("r/far", 1, 2), view.size("r/far")) == (b"near", b"12", 4)
    assert (view.exists("r/far"), view.exists("r/none"), view.size("r/none"), view.url) == (True, False, None, near.url)
    assert view.local_path("r/far") == far.local_path("r/far")
    with view.open_input("r/far") as file:
        assert file.read() == b"0123"
    view.download("r/far", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"0123"
    with pytest.raises(ObjectMissingError):
        view.read_bytes("r/none")
    (tmp_path / "new").write_bytes(b"x")
    for write in (
        lambda: view.publish("r/new", b""), lambda: view.create("r/new", b""), lambda: view.delete("r/far"),
        lambda: view.publish_file("r/new", tmp_path / "new"),
    ):  # fmt: skip
        with pytest.raises(StoreAccessError, match="view of several regions' stores; open the region's own"):
            write()
    assert far.exists("r/far")


def test_ranges_of_an_object_are_asked_of_the_store_that_has_it(stores: list[Store]) -> None:
    """Each wrong guess is a round trip over a link."""
    part = next(info.key for info in stores[1].list("r/iterations") if info.key.endswith(".parquet"))
    asked: list[str] = []

    class Asked:
        def __init__(self, store: Store) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def read_range(self, key: str, start: int, length: int) -> bytes:
            asked.append(self._store.url)
            return self._store.read_range(key, start, length)

    near: Any = [Asked(store) for store in stores]
    view = view_of(near)
    assert view.size(part) == stores[1].size(part)
    assert view.read_range(part, 0, 4) == view.read_range(part, 0, 4) == b"PAR1"
    assert asked == [stores[1].url] * 2
