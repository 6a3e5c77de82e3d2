"""No text in an address reaches a file outside the run: every file that Python opens meanwhile is looked at."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins.pages.text_diff import diff
from stages.home import DAG_PREFIX, MotleyHome
from tests.helpers.page_runs import DAG_ID, client_of, free_access, write_run
from tests.helpers.storage_builders import RUN

SECRET = "the-secret-of-another-folder"
REPOSITORY = Path(__file__).parents[3]


class Watcher:
    """Notes the files that are opened while it is on; audit hooks can't be removed."""

    def __init__(self) -> None:
        self.is_on = False
        self.opened: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            self.opened.append(os.path.realpath(os.fsdecode(arguments[0])))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Watcher, Path]]:
    outer = tmp_path_factory.mktemp("outer")
    home = outer / "home"
    home.mkdir()
    write_run(MotleyHome(home), iterations=2, num_prompts=4)
    for file in (outer / "secret.json", home / "secret.json", home / "deployment.json", home / "store" / "run.json"):
        file.write_text(f'{{"x": "{SECRET}"}}')
    client = client_of(home, free_access(iterations={"x": 0}))
    for path in ("run", "rollouts", "group", "plan"):  # everything imported, so that modules are no noise
        assert client.get(f"/dags/{DAG_ID}/{path}").status_code == 200
    watcher = Watcher()
    sys.addaudithook(watcher)
    yield client, watcher, home
    watcher.is_on = False


def allowed(home: Path) -> tuple[str, ...]:
    own = REPOSITORY / "plugins" / "pages"
    return (str(home / "runs"), str(home / "store" / RUN), str(own), sys.prefix, sys.base_prefix, "/dev/", "/proc/")


hostile = st.one_of(
    st.sampled_from([
        "../secret", "..", "../../secret.json", "%2e%2e/secret", "..%2fsecret", "/etc/passwd", "....//secret", "\x00",
        "run.json", "run-1/../../secret", "motley__../secret", "motley__run-1/..", "' OR 1=1 --", "file:///etc/passwd",
        "\\..\\secret", "read_text('/etc/passwd')", "motley__run-1\n", "a" * 300, "CON", "~/.ssh/id_rsa",
    ]),
    st.text(max_size=40),
    st.text(alphabet="./\\%2eEfF~0", max_size=20),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=hostile, page=st.sampled_from(["run", "rollouts", "rollouts.parquet", "group", "plan"]))
def test_no_dag_id_leads_out_of_the_runs(place: tuple[TestClient, Watcher, Path], name: str, page: str) -> None:
    for dag_id in (name, DAG_PREFIX + name):
        answer = looked_at(place, f"/dags/{quote(dag_id, safe='')}/{page}")
        assert answer in (200, 307, 400, 404) if dag_id == DAG_ID else answer in (307, 400, 404)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=hostile,
    field=st.sampled_from([
        "iteration", "prompt", "status", "region", "version", "order", "page", "split", "other", "plan", "finish",
        "reward_min", "colour",
    ]),
    page=st.sampled_from(["rollouts", "group", "plan"]),
)  # fmt: skip
def test_no_query_leads_out_of_the_run(
    place: tuple[TestClient, Watcher, Path], value: str, field: str, page: str
) -> None:
    text = value.encode("utf-8", "replace").decode()
    assert looked_at(place, f"/dags/{DAG_ID}/{page}?{field}={quote(text, safe='')}") in (200, 400, 404, 410)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=hostile)
def test_no_name_leads_out_of_the_static_files(place: tuple[TestClient, Watcher, Path], name: str) -> None:
    assert looked_at(place, f"/static/{quote(name, safe='')}") in (307, 404)
    assert looked_at(place, f"/dags/{DAG_ID}/dag_runs/{quote(name, safe='')}/rollouts") in (
        200,
        307,
        404,
    )  # 200: `..` is the DAG's own


def looked_at(place: tuple[TestClient, Watcher, Path], path: str) -> int:
    client, watcher, home = place
    watcher.opened.clear()
    watcher.is_on = True
    try:
        answer = client.get(path)
    finally:
        watcher.is_on = False
    outside = [
        file
        for file in watcher.opened
        if not file.startswith(allowed(home)) and not Path(file).name.startswith("motley-")
    ]
    assert outside == []
    assert SECRET not in answer.text
    assert "root:" not in answer.text
    return answer.status_code


def test_watcher_sees_a_read_outside(place: tuple[TestClient, Watcher, Path]) -> None:
    """The property above would hold for a watcher that sees nothing."""
    _, watcher, home = place
    watcher.opened.clear()
    watcher.is_on = True
    (home.parent / "secret.json").read_text()
    watcher.is_on = False
    assert watcher.opened == [os.path.realpath(home.parent / "secret.json")]
    assert not watcher.opened[0].startswith(allowed(home))


@given(first=st.text(max_size=60), second=st.text(max_size=60))
def test_both_texts_can_be_read_from_their_difference(first: str, second: str) -> None:
    pieces = diff(first, second)
    assert "".join(piece.text for piece in pieces if piece.kind != "added") == first
    assert "".join(piece.text for piece in pieces if piece.kind != "removed") == second
