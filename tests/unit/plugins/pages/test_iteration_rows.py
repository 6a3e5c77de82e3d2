"""What the pages keep of committed iterations: read once, never older than what is committed, and bounded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plugins.pages.iteration_rows import IterationRows, Kept
from plugins.pages.run_source import PageRun, RunSource
from stages.home import MotleyHome
from storage.errors import ObjectMissingError
from storage.layout import Split, manifest_key, shard_folder
from storage.rollout_queries import Order, RolloutFilter, page_of_rows, summary
from storage.store import Store, open_store
from storage.superseded import rewind
from tests.helpers.page_runs import DAG_ID, write_rows, write_run
from tests.helpers.storage_builders import NOW, RUN


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_run(MotleyHome(tmp_path), iterations=3, num_prompts=4, has_plans=False)


@pytest.fixture
def source(tmp_path: Path) -> RunSource:
    return RunSource(MotleyHome(tmp_path), lambda _entry, _region: {})


def found(source: RunSource) -> PageRun:
    return source.find(source.named(DAG_ID))


def rewards(rows: IterationRows, run: PageRun, iteration: int) -> list[float | None]:
    with rows.opened(run, Split.TRAIN, iteration) as connection:
        page = page_of_rows(connection, RolloutFilter(iteration=iteration), Order.PROMPT, offset=0, limit=50)
    return [row["reward"] for row in page]


def test_manifests_of_a_committed_iteration_are_read_once(store: Store, source: RunSource) -> None:
    rows, run = IterationRows(), found(source)
    first = rewards(rows, run, 1)
    key = manifest_key(shard_folder(RUN, 1, "reward", 0))
    kept = store.read_bytes(key)
    store.publish(key, b"{}")  # a second read would refuse this
    assert rewards(rows, run, 1) == first
    assert len(first) == 8
    store.publish(key, kept)


def test_filters_and_pages_of_a_kept_list_are_those_of_the_files(store: Store, source: RunSource) -> None:
    rows, run = IterationRows(), found(source)
    for wanted in (RolloutFilter(iteration=1, region="ohio"), RolloutFilter(iteration=1, prompt="3 + 1")):
        answers = []
        for kept in (rows, rows, IterationRows()):
            with kept.opened(run, Split.TRAIN, 1) as connection:
                page = page_of_rows(connection, wanted, Order.BEST, offset=1, limit=2)
                answers.append((summary(connection, wanted), page))
        assert answers[0] == answers[1] == answers[2]
        assert answers[0][0].matching >= 2


def test_rewards_of_an_iteration_under_way_appear_as_soon_as_they_are_there(store: Store, source: RunSource) -> None:
    rows, run = IterationRows(), found(source)
    write_rows(store, 3, 4, has_rewards=False)
    assert rewards(rows, run, 3) == [None] * 8
    write_rows(store, 3, 4)
    assert [value for value in rewards(rows, run, 3) if value is not None] != []


def test_iteration_that_was_made_anew_after_a_rewind_is_read_anew(store: Store, source: RunSource) -> None:
    rows = IterationRows()
    with rows.opened(found(source), Split.TRAIN, 2) as connection:
        assert summary(connection, RolloutFilter(iteration=2)).total == 8
    rewind(store, [], RUN, 2, reason="try again", at=NOW)
    write_rows(store, 2, 6)
    with rows.opened(found(source), Split.TRAIN, 2) as connection:
        assert summary(connection, RolloutFilter(iteration=2)).total == 12


def test_files_that_were_made_anew_after_a_loss_are_found(store: Store, source: RunSource) -> None:
    rows, run = IterationRows(), found(source)
    first = rewards(rows, run, 1)
    lost = [info.key for info in store.list(f"{RUN}/iterations/1")]
    for key in lost:
        store.delete(key)
    write_rows(store, 1, 4)
    assert {info.key for info in store.list(f"{RUN}/iterations/1")} != set(lost)  # another attempt has other files
    assert rewards(rows, run, 1) == first
    for info in [*store.list(f"{RUN}/iterations/1/reward")]:
        if info.key.endswith(".parquet"):
            store.delete(info.key)
    with pytest.raises(ObjectMissingError, match="removed by retention or by hand"):
        rewards(rows, run, 1)


def test_run_of_another_deployment_at_another_place_has_rows_of_its_own(
    store: Store, source: RunSource, tmp_path: Path
) -> None:
    rows = IterationRows()
    assert len(rewards(rows, found(source), 1)) == 8
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "runs" / f"{RUN}.json").unlink()
    write_run(MotleyHome(tmp_path), iterations=3, num_prompts=5, has_plans=False)
    assert open_store(store.url).exists(f"{RUN}/run.json")
    assert len(rewards(rows, found(source), 1)) == 10


def test_keeps_no_more_than_its_size_and_what_was_asked_for_last() -> None:
    kept: Kept[str] = Kept(10, len)
    kept.put("a", "aaaa")
    kept.put("b", "bbbb")
    assert kept.get("a") == "aaaa"
    kept.put("c", "cccc")
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == ("aaaa", None, "cccc")
    kept.put("d", "d" * 11)
    assert (kept.get("a"), kept.get("c"), kept.get("d")) == ("aaaa", "cccc", None)
    kept.put("a", "aaaaaa")
    assert (kept.get("a"), kept.get("c")) == ("aaaaaa", "cccc")
    kept.drop("a")
    kept.put("e", "eeeeee")
    assert (kept.get("a"), kept.get("c"), kept.get("e")) == (None, "cccc", "eeeeee")
