"""The pages inside a real API server: who may see them, where tabs lead, and the user interface with a page in it.

Only the API server runs; the run's data is made by a helper, so no engine is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.deployment_record import Worker
from plugins.page_mount import URL_PREFIX
from stages.home import MotleyHome, logical_date_of
from tests.helpers.airflow_apart import api_server, run_script, sign_in
from tests.helpers.chromium import browser, executable
from tests.helpers.page_runs import DAG_ID, write_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]

PATHS = [f"/dags/{DAG_ID}/run", f"/dags/{DAG_ID}/rollouts", f"/dags/{DAG_ID}/group", f"/dags/{DAG_ID}/plan", "/cluster"]

_WORKER = """
from airflow.providers.edge3.models.edge_worker import EdgeWorkerModel
from airflow.utils import timezone
from airflow.utils.session import create_session
with create_session() as session:
    worker = EdgeWorkerModel(worker_name="m1", state="idle", queues=["m1"], last_update=timezone.utcnow())
    worker.sysinfo = {"region": "ohio", "gpu": "L4", "gpu_count": 2, "disk_free_gb": 8.5}
    worker.jobs_active = 0
    session.add(worker)
"""


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("pages")
    store = write_run(MotleyHome(home), iterations=12, num_prompts=40)
    worker = Worker(machine="m1", queue="m1", region="ohio", gpu="L4", count=2, concurrency=1, roots=(store.url,))
    with api_server(home, worker) as (address, environment):
        run_script(environment, _WORKER)
        body = {
            "dag_id": DAG_ID,
            "from_date": logical_date_of(4).isoformat(),
            "to_date": logical_date_of(5).isoformat(),
        }
        sent = httpx.post(f"{address}/api/v2/backfills", json=body, headers=bearer(sign_in(address)), timeout=300.0)
        assert sent.status_code == 200, sent.text
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=300.0) as found:
        yield found


@pytest.fixture(scope="module")
def token(client: httpx.Client) -> dict[str, str]:
    return bearer(sign_in(str(client.base_url).rstrip("/")))


def test_page_needs_airflows_sign_in(client: httpx.Client, token: dict[str, str]) -> None:
    for path in (*PATHS, "/static/pages.css", f"/dags/{DAG_ID}/rollouts.parquet"):
        address = URL_PREFIX + path
        assert client.get(address).status_code == 401, path
        assert client.get(address, headers={"Authorization": "Bearer forged"}).status_code in (401, 403), path
        assert client.get(address, headers={"Cookie": "_token=forged"}).status_code in (401, 403), path
        assert client.get(address, headers=token).status_code == 200, path
        sent = client.get(address, headers={"Accept": "text/html"})
        assert (sent.status_code, "/api/v2/auth/login?next=" in sent.headers["location"]) == (302, True), path


def test_dag_run_leads_to_its_iteration(client: httpx.Client, token: dict[str, str]) -> None:
    runs = client.get(f"/api/v2/dags/{DAG_ID}/dagRuns", headers=token).json()["dag_runs"]
    assert len(runs) == 2
    for k, run in enumerate(sorted(runs, key=lambda item: item["logical_date"]), start=4):
        for page in ("rollouts", "plan"):
            answer = client.get(f"{URL_PREFIX}/dags/{DAG_ID}/dag_runs/{run['dag_run_id']}/{page}", headers=token)
            assert answer.headers["location"] == f"{URL_PREFIX}/dags/{DAG_ID}/{page}?iteration={k}"
    unknown = client.get(f"{URL_PREFIX}/dags/{DAG_ID}/dag_runs/nope/rollouts", headers=token)
    assert (unknown.status_code, f"DAG {DAG_ID} has no DAG run" in unknown.text) == (404, True)


def test_cluster_shows_workers_and_what_does_not_run(client: httpx.Client, token: dict[str, str]) -> None:
    text = client.get(f"{URL_PREFIX}/cluster", headers=token).text
    assert '<span class="tag good">healthy</span> metadatabase' in text
    assert re.search(r'<span class="tag bad">[^<]*</span> scheduler', text)
    assert re.search(r"<td>m1</td><td><span class=\"tag good\">idle</span></td><td>m1</td><td>ohio</td><td>2 L4", text)
    assert "No task of a run waits or runs." in text


def test_user_interface_shows_the_pages_as_tabs(
    url: str, client: httpx.Client, token: dict[str, str], tmp_path: Path
) -> None:
    assert client.get("/api/v2/plugins/importErrors", headers=token).json()["import_errors"] == []
    if executable() is None:
        pytest.skip("no Chromium: apt-get install chromium")
    runs = client.get(f"/api/v2/dags/{DAG_ID}/dagRuns", headers=token).json()["dag_runs"]
    with browser() as launched:
        context = launched.new_context(viewport={"width": 1280, "height": 900})
        context.add_cookies([{"name": "_token", "value": token["Authorization"].removeprefix("Bearer "), "url": url}])
        page = context.new_page()
        page.set_default_timeout(900_000)
        page.goto(f"{url}/dags/{DAG_ID}/runs/{runs[-1]['dag_run_id']}")
        page.get_by_role("link", name="Rollouts").click()
        frame = page.frame_locator("iframe")
        frame.locator("table.rollouts").wait_for()
        assert frame.locator("h2").first.inner_text().startswith("Iteration ")
        page.screenshot(path=str(Path(os.environ.get("MOTLEY_PICTURES", tmp_path)) / "rollouts-in-airflow.png"))
        with page.expect_download() as waiting:
            frame.get_by_role("link", name="as Parquet").click()
        assert waiting.value.suggested_filename.endswith(".parquet")
