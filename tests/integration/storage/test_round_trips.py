"""How many requests reading takes: over a link of 60 ms each one is worth a megabyte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.regions.tcp_proxy import Shape, requests_of, tcp_proxy
from storage.range_cache import CachingStore
from storage.rollouts import read_rollouts, shard_manifests
from storage.runs import load_run
from storage.store import Store, open_store
from tests.helpers.s3_server import s3_server
from tests.helpers.storage_builders import RUN, new_run, write_iteration_data


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    """Give a store with a run behind a proxy, and the proxy's journal."""
    journal = tmp_path / "journal"
    journal.touch()
    with s3_server(tmp_path / "s3", "rl") as server, tcp_proxy(server.port, Shape(), journal) as line:
        near = open_store("s3://rl/r", skip_instance_cache=True, **server.options())
        new_run(near)
        write_iteration_data(near)
        yield open_store("s3://rl/r", skip_instance_cache=True, **server.options(line.port)), journal


def asked(journal: Path) -> Counter[str]:
    """Return the requests since the last look, by method."""
    found = Counter(str(one["method"]) for one in requests_of(journal))
    journal.write_text("")
    return found


def test_document_is_one_request(far: tuple[Store, Path]) -> None:
    store, journal = far
    assert load_run(store, RUN).run == RUN
    assert asked(journal) == {"GET": 1}


def test_rows_are_one_look_up_and_one_range_for_each_shard_and_then_the_look_up_alone(
    far: tuple[Store, Path], tmp_path: Path
) -> None:
    store, journal = far
    num_shards = len(shard_manifests(store, RUN, 0))
    asked(journal)
    cached = CachingStore(store, tmp_path / "cache")
    first = read_rollouts(cached, RUN, 0, columns=["row_id", "completion_token_ids"])
    assert asked(journal) == {"GET": 2 * num_shards, "HEAD": num_shards}  # its manifest, and its only block
    assert read_rollouts(cached, RUN, 0, columns=["row_id", "completion_token_ids"]) == first
    assert asked(journal) == {"GET": num_shards, "HEAD": num_shards}
