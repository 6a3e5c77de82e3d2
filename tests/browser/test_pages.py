"""The pages as a person meets them: loaded, filtered, clicked, in both themes, without serious axe findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from plugins.pages.access import WorkerState
from stages.home import MotleyHome
from tests.helpers.chromium import VARIABLE, browser, executable
from tests.helpers.page_runs import DAG_ID, free_access, write_run
from tests.helpers.page_server import page_server
from tests.helpers.slow_stores import Gate
from tests.helpers.storage_builders import NOW

pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.skipif(executable() is None, reason=f"no Chromium: apt-get install chromium, or set {VARIABLE}"),
]

PATHS = {
    "cluster": "/cluster",
    "run": f"/dags/{DAG_ID}/run",
    "rollouts": f"/dags/{DAG_ID}/rollouts",
    "group": f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4",
    "pair": f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4&other=2&colour=advantage",
    "plan": f"/dags/{DAG_ID}/plan",
    "error": "/dags/motley__nope/run",
}
WORKERS = [
    WorkerState(
        name="m0", state="idle", queues=("m0",), last_heartbeat=NOW, jobs_active=0,
        facts={"region": "virginia", "gpu": "A100-40", "gpu_count": 4, "disk_free_gb": 81.5},
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    write_run(MotleyHome(path), iterations=6, num_prompts=40)
    return path


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with page_server(home, free_access(workers=WORKERS)) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as launched:
        yield launched


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    opened = chromium.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(120_000)
    yield opened
    opened.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PATHS)
def test_page_fits_has_no_script_error_and_no_serious_axe_finding(
    chromium: Any, url: str, name: str, theme: str, tmp_path: Path
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    opened = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme=theme)
    opened.set_default_timeout(120_000)
    errors: list[str] = []
    requested: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: requested.append(request.url))
    opened.goto(url + PATHS[name])
    picture = Path(os.environ.get("MOTLEY_PICTURES", tmp_path)) / f"{name}-{theme}.png"
    opened.screenshot(path=str(picture), full_page=True)
    assert picture.stat().st_size > 5000
    assert errors == []
    assert [found for found in requested if not found.startswith(url.rpartition("/")[0])] == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1280
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")
    findings = Axe().run(opened).response["violations"]
    bad = [(f["id"], f["nodes"][0]["html"]) for f in findings if f["impact"] in ("serious", "critical")]
    assert bad == []
    opened.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_shows_its_frame_while_its_facts_are_awaited(chromium: Any, home: Path, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    gate = Gate()
    with page_server(home, free_access(), 0.0, gate.options_of) as url:
        opened = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme=theme)
        opened.set_default_timeout(120_000)
        errors: list[str] = []
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.goto(url + PATHS["rollouts"] + "?iteration=3&region=ohio", wait_until="commit")
        opened.get_by_role("status").wait_for()
        painted = "performance.getEntriesByName('first-contentful-paint').length"
        while not opened.evaluate(painted):  # the page's policy forbids to wait by a script's text
            opened.wait_for_timeout(50)
        assert opened.locator("h1").inner_text() == "Rollouts"
        assert opened.get_by_role("link", name="Plan").is_visible()
        assert opened.get_by_label("Region").input_value() == "ohio"
        assert opened.locator("#found").count() == 0
        findings = Axe().run(opened).response["violations"]
        assert [(f["id"], f["nodes"][0]["html"]) for f in findings if f["impact"] in ("serious", "critical")] == []
        gate.open()
        opened.wait_for_load_state("load")
        assert opened.locator("table.rollouts tbody tr").count() == 40
        assert not opened.locator(".waiting").is_visible()
        assert errors == []
        opened.close()


def test_page_that_arrives_late_needs_no_script(chromium: Any, home: Path) -> None:
    gate = Gate()
    context = chromium.new_context(java_script_enabled=False)
    with page_server(home, free_access(), 0.0, gate.options_of) as url:
        opened = context.new_page()
        opened.set_default_timeout(120_000)
        opened.goto(url + PATHS["run"], wait_until="commit")
        opened.get_by_role("status").wait_for()
        assert opened.locator("svg.chart").count() == 0
        gate.open()
        opened.wait_for_load_state("load")
        assert opened.locator("svg.chart polyline").count() > 10
        assert not opened.locator(".waiting").is_visible()
    context.close()


def test_filter_group_and_comparison_by_hand(page: Any, url: str) -> None:
    page.goto(url + PATHS["rollouts"])
    page.get_by_label("Region").select_option("ohio")
    page.get_by_label("Reward from").fill("0.5")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**region=ohio**")
    found = page.locator("#found").inner_text()
    assert found.startswith("18 of 80 completions")
    assert page.locator("table.rollouts tbody tr").count() == 18
    page.locator("table.rollouts a").first.click()
    page.wait_for_url("**/group?**")
    page.get_by_label("Beside iteration").fill("2")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**other=2**")
    assert page.locator("ins").count() >= 2
    page.get_by_role("link", name="Find this prompt in other iterations").click()
    page.wait_for_selector("#occurrences")
    assert page.locator("#occurrences a").count() == 5


def test_download_holds_the_filtered_rows(page: Any, url: str, tmp_path: Path) -> None:
    page.goto(url + PATHS["rollouts"] + "?iteration=3&finish=length")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="as Parquet").click()
    waiting.value.save_as(tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet")
    assert rows.num_rows == 16
    assert set(rows.column("finish_reason").to_pylist()) == {"length"}


def test_values_under_the_pointer_are_said_below_a_chart(page: Any, url: str) -> None:
    page.goto(url + PATHS["run"])
    figure = page.locator("figure.plot").first
    figure.locator("svg").hover()
    said = figure.locator(".readout").inner_text()
    assert said.startswith(("iteration 2: training 0.21", "iteration 3: training 0.215"))


def test_pages_are_complete_without_scripts(chromium: Any, url: str) -> None:
    context = chromium.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.set_default_timeout(120_000)
    opened.goto(url + PATHS["run"])
    assert opened.locator("svg.chart polyline").count() > 10
    context.close()


def test_inside_airflow_the_pages_take_its_theme(chromium: Any, url: str) -> None:
    opened = chromium.new_page(color_scheme="light")
    opened.set_default_timeout(120_000)
    opened.goto(url.rpartition("/")[0] + "/elsewhere")  # the pages themselves forbid frames in them
    opened.evaluate(
        """path => { document.documentElement.className = "dark";
        document.body.innerHTML = `<iframe src="${path}" sandbox="allow-scripts allow-same-origin"></iframe>`; }""",
        url + PATHS["plan"],
    )
    frame = opened.frame_locator("iframe")
    frame.locator("html[data-theme=dark]").wait_for()
    opened.evaluate("document.documentElement.className = 'light'")
    frame.locator("html[data-theme=light]").wait_for()
    assert frame.locator("html[data-theme=dark]").count() == 0
    opened.close()
