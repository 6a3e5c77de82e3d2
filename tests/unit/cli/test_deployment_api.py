from __future__ import annotations

import httpx
import pytest

from cli.deployment_api import AirflowApi
from cli.errors import DeploymentError
from stages.home import logical_date_of
from tests.helpers.airflow_server import AirflowServer


def api_of(server: AirflowServer) -> AirflowApi:
    return AirflowApi("http://127.0.0.1:1", transport=server.transport())


def test_health_of_a_server_that_answers_and_of_one_that_does_not() -> None:
    server = AirflowServer("motley__demo")
    names = ("metadatabase", "scheduler", "dag_processor", "triggerer")
    assert api_of(server).health() == dict.fromkeys(names, "healthy")
    server.is_down = True
    assert api_of(server).health() == dict.fromkeys(names)


def test_dag_that_airflow_does_not_know_is_none() -> None:
    server = AirflowServer("motley__demo")
    assert api_of(server).dag("motley__other") is None
    assert (api_of(server).dag("motley__demo") or {})["dag_id"] == "motley__demo"


def test_dag_runs_are_all_pages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.deployment_api._PAGE", 2)
    server = AirflowServer("motley__demo", states={4: "success", 0: "success", 2: "failed", 1: "success", 3: "running"})
    assert [run["dag_run_id"] for run in api_of(server).dag_runs("motley__demo")] == [f"run-{k}" for k in range(5)]
    assert [run["dag_run_id"] for run in api_of(server).dag_runs("motley__demo", ("failed", "running"))] == [
        "run-2",
        "run-3",
    ]
    assert api_of(server).count_runs("motley__demo", "success") == 3


def test_backfill_is_of_one_iteration_with_its_own_slot() -> None:
    server = AirflowServer("motley__demo", states={3: "failed"})
    made = api_of(server).backfill_iteration("motley__demo", 3)
    date = logical_date_of(3).isoformat()
    assert {key: made[key] for key in ("from_date", "to_date", "max_active_runs", "reprocess_behavior")} == {
        "from_date": date,
        "to_date": date,
        "max_active_runs": 1,
        "reprocess_behavior": "failed",
    }
    assert server.states == {3: "queued"}


def test_second_backfill_is_refused_with_airflows_words() -> None:
    server = AirflowServer("motley__demo", states={3: "failed"})
    api = api_of(server)
    api.backfill_iteration("motley__demo", 3)
    with pytest.raises(
        DeploymentError, match=r"refused POST /api/v2/backfills with status 409: .*Another backfill is running"
    ):
        api.backfill_iteration("motley__demo", 4)
    api.cancel_backfill(1)
    assert api.active_backfills("motley__demo") == []


def test_server_that_is_gone_is_a_sentence() -> None:
    server = AirflowServer("motley__demo", is_down=True)
    with pytest.raises(
        DeploymentError, match=r"does not answer GET /api/v2/dags/motley__demo .*look at `motley status`"
    ):
        api_of(server).dag("motley__demo")


def test_token_that_ended_is_fetched_again() -> None:
    tokens = iter(["old", "new"])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            return httpx.Response(201, json={"access_token": next(tokens)})
        is_new = request.headers["Authorization"] == "Bearer new"
        return httpx.Response(200 if is_new else 401, json={"import_errors": []})

    assert AirflowApi("http://127.0.0.1:1", transport=httpx.MockTransport(answer)).import_errors() == []


def test_server_that_is_no_motley_deployment_is_a_sentence() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404))
    with pytest.raises(DeploymentError, match=r"gives no token \(status 404\); is it a deployment of Motley"):
        AirflowApi("http://127.0.0.1:1", transport=transport).import_errors()


def busy_server(server: AirflowServer, num_failures: int) -> httpx.MockTransport:
    """A server whose database is locked for its first requests."""
    left = iter(range(num_failures))

    def answer(request: httpx.Request) -> httpx.Response:
        found = server.answer(request)
        is_locked = request.url.path != "/auth/token" and next(left, None) is not None
        return httpx.Response(500, json={"detail": {"reason": "Database error"}}) if is_locked else found

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("num_failures", [1, 4])
def test_request_that_sets_a_state_is_repeated_while_the_database_is_locked(num_failures: int) -> None:
    """Found by the crash campaign: a resume on a crowded machine ended with Airflow's status 500."""
    server = AirflowServer("motley__demo")
    api = AirflowApi("http://127.0.0.1:1", transport=busy_server(server, num_failures), first_wait_s=0.0)

    api.set_paused("motley__demo", is_paused=True)

    assert (server.is_paused, len(server.requests)) == (True, num_failures + 1)


def test_backfill_that_a_locked_database_left_half_made_is_ended_before_it_is_made_again() -> None:
    """Found by the system tests: Airflow commits a backfill before its DAG runs, then answers 503."""
    server, locked = AirflowServer("motley__demo", states={3: "failed"}), iter([True])

    def answer(request: httpx.Request) -> httpx.Response:
        found = server.answer(request)
        is_made = (request.method, request.url.path) == ("POST", "/api/v2/backfills")
        return httpx.Response(503, json={"detail": "Database is locked."}) if is_made and next(locked, False) else found

    api = AirflowApi("http://127.0.0.1:1", transport=httpx.MockTransport(answer), first_wait_s=0.0)

    api.backfill_iteration("motley__demo", 3)

    assert [(method, path.removeprefix("/api/v2/")) for method, path in server.requests if method != "GET"] == [
        ("POST", "backfills"),
        ("PUT", "backfills/1/cancel"),
        ("POST", "backfills"),
    ]
    assert len(api.active_backfills("motley__demo")) == 1


def test_database_that_stays_locked_is_a_sentence_and_nothing_is_made_twice() -> None:
    server = AirflowServer("motley__demo", states={3: "failed"})
    api = AirflowApi("http://127.0.0.1:1", transport=busy_server(server, 100), first_wait_s=0.0)

    with pytest.raises(DeploymentError, match=r"refused GET /api/v2/dags/motley__demo with status 500: .*Database"):
        api.dag("motley__demo")
    assert len(server.requests) == 5
    with pytest.raises(DeploymentError, match=r"refused GET /api/v2/backfills with status 500"):
        api.backfill_iteration("motley__demo", 3)
    assert [method for method, _ in server.requests[5:]] == ["POST"] + ["GET"] * 5
    assert len(server.backfills) == 1


def test_server_that_does_not_answer_in_time_is_asked_again() -> None:
    server, slow = AirflowServer("motley__demo"), iter([True])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/auth/token" and next(slow, False):
            raise httpx.ReadTimeout("late")
        return server.answer(request)

    api = AirflowApi("http://127.0.0.1:1", transport=httpx.MockTransport(answer), first_wait_s=0.0)
    assert (api.dag("motley__demo") or {})["dag_id"] == "motley__demo"
