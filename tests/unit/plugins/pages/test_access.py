"""Nobody sees anything without Airflow's leave: every route, with the guards that a deployment has."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from plugins.page_mount import URL_PREFIX, external_views
from plugins.pages.app import deployed_app
from tests.helpers.page_runs import DAG_ID, client_of, free_access

pytest.importorskip("airflow.sdk")

PARTS = {"dag_id": DAG_ID, "dag_run_id": "scheduled__x", "file": "pages.css"}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    app = deployed_app({"MOTLEY_HOME": str(tmp_path_factory.mktemp("home"))})
    return TestClient(app, follow_redirects=False)


def routes_of(client: TestClient) -> list[APIRoute]:
    found = [route for route in client.app.routes if isinstance(route, APIRoute)]  # type: ignore[attr-defined]
    assert len(found) == len(client.app.routes) >= 9  # type: ignore[attr-defined]
    return found


def guards_of(dependant: Dependant) -> set[str]:
    return {
        name
        for inner in dependant.dependencies
        for name in {getattr(inner.call, "__qualname__", ""), *guards_of(inner)}
    }


def test_every_route_of_a_deployment_refuses_whoever_is_not_signed_in(deployed: TestClient) -> None:
    for route in routes_of(deployed):
        path = route.path.format(**{name: PARTS[name] for name in route.param_convertors})
        answer = deployed.get(path)
        assert (answer.status_code, answer.text) == (401, "Sign in to Airflow to see this page.\n"), path


def test_every_route_of_a_deployment_depends_on_airflows_user(deployed: TestClient) -> None:
    for route in routes_of(deployed):
        assert "get_user" in guards_of(route.dependant), route.path
        is_about_a_run = "{dag_id}" in route.path
        assert ("requires_access_dag.<locals>.inner" in guards_of(route.dependant)) == is_about_a_run, route.path


def test_every_route_only_reads(deployed: TestClient) -> None:
    assert {method for route in routes_of(deployed) for method in route.methods} == {"GET"}
    assert deployed.post(f"/dags/{DAG_ID}/run").status_code == HTTPStatus.METHOD_NOT_ALLOWED


def test_a_browser_is_sent_to_where_one_signs_in_and_comes_back(deployed: TestClient) -> None:
    answer = deployed.get(f"/dags/{DAG_ID}/rollouts?iteration=3", headers={"Accept": "text/html,*/*"})
    assert answer.status_code == HTTPStatus.FOUND
    start, _, back = answer.headers["location"].partition("?next=")
    assert start.endswith("/api/v2/auth/login")
    assert back == f"%2Fdags%2F{DAG_ID}%2Frollouts%3Fiteration%3D3"


def test_account_without_rights_gets_no_content(tmp_path: Path) -> None:
    client = client_of(tmp_path, free_access(refusal=403))
    for route in routes_of(client):
        answer = client.get(route.path.format(**{name: PARTS[name] for name in route.param_convertors}))
        assert (answer.status_code, answer.headers["content-type"]) == (403, "text/plain; charset=utf-8")
        assert answer.text.startswith("Your Airflow account may not see this")


def test_pages_forbid_scripts_and_frames_of_others_and_are_kept_by_no_cache(tmp_path: Path) -> None:
    headers = client_of(tmp_path).get("/cluster").headers
    assert "default-src 'none'; style-src 'self'; script-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'self'" in headers["content-security-policy"]
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("private, no-store", "nosniff")


def test_views_lead_below_the_path_of_the_user_interface() -> None:
    views = external_views("https://example.org/airflow/")
    assert {view["destination"] for view in views} == {"dag", "dag_run", "nav"}
    assert all(view["href"].startswith(f"/airflow{URL_PREFIX}/") for view in views)
    assert len({view["url_route"] for view in views}) == len(views)
    assert external_views("")[0]["href"] == f"{URL_PREFIX}/dags/{{DAG_ID}}/run"
