from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli import follow_view
from cli.deployment_api import AirflowApi
from cli.errors import RunFailedError
from cli.follow import RunFollower
from cli.output import Output
from cli.resume import clear_the_way, first_to_redo
from stages.home import dag_id_of
from stages.run_entry import MachineEntry, RunEntry
from storage.documents import model_bytes
from storage.layout import policy_head
from storage.policies import PolicyHead
from storage.store import Store, open_store
from tests.helpers.airflow_server import AirflowServer, task

ENTRY = RunEntry(
    run="demo",
    roots={"local": "file:///data"},
    machines=(MachineEntry(name="box", queue="gpu", region="local"),),
    iterations=4,
)


class ServerThatRuns(AirflowServer):
    """Ends a queued iteration at the next look, by commands of the test."""

    on_run: Callable[[int], str]

    def answer(self, request: httpx.Request) -> httpx.Response:
        answer = super().answer(request)
        if request.method == "GET" and request.url.path.endswith("/taskInstances") and not self.is_paused:
            for k, state in self.states.items():
                if state == "queued":
                    self.states[k] = self.on_run(k)
                    for backfill in self.backfills:
                        backfill["completed_at"] = "2026-01-01T00:00:00Z"
        return answer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


@pytest.fixture
def server(store: Store) -> ServerThatRuns:
    server = ServerThatRuns(dag_id_of("demo"), is_paused=True)

    def succeed(iteration: int) -> str:
        commit(store, iteration + 1)
        return "success"

    server.on_run = succeed
    return server


@pytest.fixture
def follower(server: ServerThatRuns, store: Store, monkeypatch: pytest.MonkeyPatch) -> RunFollower:
    monkeypatch.setattr(follow_view, "POLL_INTERVAL_S", 0.0)
    return RunFollower(api=AirflowApi("http://127.0.0.1:1", transport=server.transport()), store=store, entry=ENTRY)


def commit(store: Store, version: int) -> None:
    head = PolicyHead(version=version, weights_hash="0" * 64, rollbacks=())
    store.publish(policy_head("demo"), model_bytes(head, policy_head("demo")))


@pytest.mark.parametrize(
    ("states", "head", "expected"),
    [
        ({}, None, None),
        ({0: "success", 1: "success"}, 2, None),
        ({0: "success", 1: "failed"}, 1, (1, False)),
        ({0: "failed", 1: "failed"}, 0, (0, False)),
        ({0: "success", 1: "success", 2: "success"}, 2, (2, True)),
        ({0: "success", 1: "running"}, 1, None),
        ({0: "failed", 1: "success"}, 2, (0, False)),
    ],
)
def test_first_iteration_to_redo_follows_from_airflow_and_the_committed_data(
    server: ServerThatRuns,
    follower: RunFollower,
    store: Store,
    states: dict[int, str],
    head: int | None,
    expected: tuple[int, bool] | None,
) -> None:
    server.states = states
    if head is not None:
        commit(store, head)
    assert first_to_redo(follower.api, store, ENTRY) == expected


def test_failed_iterations_are_run_again_in_order_each_as_its_own_backfill(
    server: ServerThatRuns, follower: RunFollower, store: Store
) -> None:
    """A3, A5: by a backfill of one iteration, never by clearing; a DAG left paused would hold it."""
    server.states = {0: "success", 1: "failed", 2: "failed"}
    commit(store, 1)
    clear_the_way(follower, Output(is_json=True))
    assert server.states == {0: "success", 1: "success", 2: "success"}
    assert [(b["from_date"][14:16], b["reprocess_behavior"]) for b in server.backfills] == [
        ("01", "failed"),
        ("02", "failed"),
    ]
    assert not server.is_paused


def test_iteration_marked_successful_by_hand_is_run_again(
    server: ServerThatRuns, follower: RunFollower, store: Store
) -> None:
    server.states = {0: "success", 1: "success"}
    commit(store, 1)
    clear_the_way(follower, Output(is_json=True))
    assert [b["reprocess_behavior"] for b in server.backfills] == ["completed"]


def test_backfill_in_the_way_is_cancelled(server: ServerThatRuns, follower: RunFollower, store: Store) -> None:
    server.states = {0: "failed"}
    server.backfills = [{"id": 9, "completed_at": None}]
    clear_the_way(follower, Output(is_json=True))
    assert ("PUT", "/api/v2/backfills/9/cancel") in server.requests
    assert server.states == {0: "success"}


def test_iteration_that_fails_again_ends_the_resume(server: ServerThatRuns, follower: RunFollower) -> None:
    server.states, server.tasks = {0: "failed"}, {0: [task("train.gpu", "failed")]}
    server.on_run = lambda _: "failed"
    with pytest.raises(RunFailedError, match=r"iteration 0 failed in train.gpu"):
        clear_the_way(follower, Output(is_json=True))


def test_iteration_that_succeeds_without_its_policy_is_not_tried_for_ever(
    server: ServerThatRuns, follower: RunFollower, store: Store
) -> None:
    server.states = {0: "success"}
    server.on_run = lambda _: "success"
    commit(store, 0)
    with pytest.raises(RunFailedError, match="ran again without committing policy version 1"):
        clear_the_way(follower, Output(is_json=True))
