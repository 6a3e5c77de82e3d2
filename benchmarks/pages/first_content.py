"""How soon the pages show something in Chromium, and whether a million rows freeze them.

`python -m benchmarks.pages.first_content --folder DIR --out benchmarks/pages/results`; the runs that lie in DIR already
are used again. One run has 100 iterations of 10,000 rows, another one iteration of a million. Each page is visited by
the clock of the browser: seconds from the click to the first bytes, to the first content (the browser's own
`first-contentful-paint`) and to the first facts, the longest task of its main thread, and meanwhile the longest wait of
another request at the same server. The exit code is 1 when a page shows its first content after more than a second.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.pages.many_rows import write_home
from benchmarks.storage.record import write_result
from tests.helpers.chromium import browser
from tests.helpers.page_runs import DAG_ID, free_access
from tests.helpers.page_server import page_server

GOAL_S: Final = 1.0
"""Longest time to the first content."""

VISITS: Final = 3
"""Visits of each page: the first one finds nothing kept in the server of what the page shows."""

_LIST: Final = f"/dags/{DAG_ID}/rollouts"
MANY: Final = {
    "first page of the process": f"/dags/{DAG_ID}/run",
    "run": f"/dags/{DAG_ID}/run",
    "rollouts": f"{_LIST}?iteration=57",
    "rollouts by prompt, reward and region": f"{_LIST}?iteration=58&prompt=question+7&reward_max=0.5&region=region-1",
    "rollouts, best, last page": f"{_LIST}?iteration=59&order=best&page=200",
    "worst prompt": f"/dags/{DAG_ID}/group?iteration=60",
    "prompt in all 100 iterations": f"/dags/{DAG_ID}/group?iteration=61&prompt=arithmetic/77&find=true",
    "plan": f"/dags/{DAG_ID}/plan",
    "cluster": "/cluster",
}
LARGE: Final = {
    "a million rows": f"{_LIST}?iteration=0",
    "a million rows by reward and region": f"{_LIST}?iteration=0&reward_max=0.5&region=region-1",
    "a million rows by text": f"{_LIST}?iteration=0&prompt=question+77",
    "a million rows, best, page 15,000": f"{_LIST}?iteration=0&order=best&page=15000",
    "worst prompt of a million rows": f"/dags/{DAG_ID}/group?iteration=0",
}

_OBSERVE: Final = """
window.measured = { longest: 0, facts: null };
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) measured.longest = Math.max(measured.longest, task.duration);
}).observe({ type: "longtask", buffered: true });
new MutationObserver((_, observer) => {
  if (!document.querySelector("main table, main svg, main article, main #found")) return;
  measured.facts = performance.now();
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });
"""
_READ: Final = """async () => {
  while (!performance.getEntriesByName("first-contentful-paint").length || measured.facts === null) {
    await new Promise((done) => setTimeout(done, 20));
  }
  return {
    first_byte_s: performance.getEntriesByType("navigation")[0].responseStart / 1000,
    first_content_s: performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000,
    facts_s: measured.facts / 1000, longest_task_s: measured.longest / 1000,
  };
}"""


def main() -> int:
    """Write what is missing, visit every page, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--large", type=int, default=1_000_000, help="Rows of the iteration of the second run; 0: none")
    given = parser.parse_args()
    data = measured(written(given.folder / "many", iterations=100, rows=10_000, num_tokens=48), MANY)
    if given.large:
        data |= measured(written(given.folder / "large", iterations=1, rows=given.large, num_tokens=8), LARGE)
    settings = {"iterations": 100, "rows": 10_000, "large": given.large, "visits": VISITS, "goal_s": GOAL_S}
    write_result("first_content", settings, data, folder=given.out)
    return 0 if all(one["first_content_s"] <= GOAL_S for page in data.values() for one in page.values()) else 1


def written(home: Path, *, iterations: int, rows: int, num_tokens: int) -> Path:
    """Return a home with a run of that size."""
    write_home(home, iterations=iterations, rows=rows, num_tokens=num_tokens)
    return home


def measured(home: Path, pages: dict[str, str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return of each page what the first visit and the best of the later ones took."""
    found = {}
    with page_server(home, free_access()) as url, browser() as chromium:
        chromium.new_page().goto("data:text/html,<p>A browser's first page of all takes longer.</p>")
        for name, path in pages.items():
            first, *later = [visited(chromium, url, path) for _ in range(VISITS)]
            found[name] = {"first": first, "again": {key: min(one[key] for one in later) for key in first}}
            print(name, found[name], flush=True)
    return found


def visited(chromium: Any, url: str, path: str) -> dict[str, float]:  # noqa: ANN401 - Playwright's browser
    """Return what one visit of a page took, by a browser that has nothing of it in its cache."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.add_init_script(_OBSERVE)
    page = context.new_page()
    page.set_default_timeout(600_000)
    cpu_s = time.process_time()
    with _others_wait(f"{url}/static/pages.css") as waits:
        page.goto(url + path)
        found: dict[str, float] = page.evaluate(_READ)
    found |= {"server_cpu_s": time.process_time() - cpu_s, "others_wait_s": max(waits)}
    context.close()
    return {key: round(value, 3) for key, value in found.items()}


@contextmanager
def _others_wait(url: str) -> Iterator[list[float]]:
    """Ask for a small file meanwhile, again and again; give the seconds that each answer took."""
    waits: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=600.0) as client:
            while not is_over.is_set():
                start = time.perf_counter()
                client.get(url).raise_for_status()
                waits.append(time.perf_counter() - start)
                is_over.wait(0.1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield waits
    finally:
        is_over.set()
        asking.join()


if __name__ == "__main__":
    sys.exit(main())
