"""Pages whose facts take long: the frame is sent before any store is asked, and the rest of the page follows."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp

from plugins.pages.app import build_app
from plugins.pages.run_source import OptionsOf, RunSource
from stages.home import MotleyHome
from tests.helpers.page_runs import DAG_ID, free_access, sentence
from tests.helpers.slow_stores import Gate
from tests.helpers.storage_builders import RUN

PAGES = [
    (f"/dags/{DAG_ID}/run", f"Run {RUN}", "Curves by iteration"),
    (f"/dags/{DAG_ID}/rollouts?iteration=1", "Rollouts", "of 40 completions"),
    (f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4", "Prompt arithmetic/4", "log-prob -0.050"),
    (f"/dags/{DAG_ID}/plan", "Plan", "Memory by GPU"),
    ("/cluster", "Cluster", "A100-SXM4-40GB"),
]


def app_of(home: Path, options_of: OptionsOf, patience_s: float) -> FastAPI:
    return build_app(RunSource(MotleyHome(home), options_of), free_access(), patience_s)


def answered(
    app: ASGIApp, path: str, after_part: Callable[[str], None], decoded: Callable[[bytes], str] = bytes.decode
) -> tuple[int, list[str]]:
    """Ask an application for a page; give its status and the parts that it sent, each looked at when it was sent."""
    parts: list[str] = []
    status: list[int] = []
    address, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": address, "raw_path": address.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(b"accept-encoding", b"gzip")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip

    async def ask() -> None:
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.sleep(600)  # the client stays
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            elif message.get("body"):
                parts.append(decoded(message["body"]))
                after_part(parts[-1])

        await app(scope, receive, send)

    asyncio.run(ask())
    return status[0], parts


@pytest.mark.parametrize(("path", "heading", "content"), PAGES)
def test_frame_is_sent_before_a_store_is_asked(page_home: Path, path: str, heading: str, content: str) -> None:
    gate = Gate()
    status, parts = answered(app_of(page_home, gate.options_of, 0.0), path, lambda _part: gate.open())
    assert status == 200
    first, rest = parts[0], "".join(parts[1:])
    assert f"<h1>{heading}</h1>" in first
    assert 'aria-label="Pages"' in first
    assert 'role="status">Reading what is known' in first
    assert content not in first
    assert content in rest
    assert rest.endswith("</main>\n</body>\n</html>\n")


@pytest.mark.parametrize(("path", "heading", "content"), PAGES)
def test_page_that_is_ready_in_time_is_sent_whole(page_home: Path, path: str, heading: str, content: str) -> None:
    status, parts = answered(app_of(page_home, lambda _entry, _region: {}, 300.0), path, lambda _part: None)
    assert (status, len(parts)) == (200, 1)
    assert f"<h1>{heading}</h1>" in parts[0]
    assert content in parts[0]
    assert 'role="status"' not in parts[0]


def test_frame_passes_the_compression_of_airflows_server(page_home: Path) -> None:
    gate, stream = Gate(), zlib.decompressobj(16 + zlib.MAX_WBITS)
    app = GZipMiddleware(app_of(page_home, gate.options_of, 0.0), minimum_size=1024, compresslevel=5)
    seen: list[str] = []

    def after_part(part: str) -> None:
        seen.append(part)
        if 'role="status"' in "".join(seen):
            gate.open()

    _, parts = answered(app, PAGES[0][0], after_part, lambda part: stream.decompress(part).decode())
    assert len([part for part in parts if part]) >= 2
    assert "".join(parts).endswith("</main>\n</body>\n</html>\n")


def test_page_is_the_same_whether_its_facts_were_late_or_not(page_home: Path) -> None:
    for path, _, _ in PAGES:
        gate = Gate()
        _, late = answered(app_of(page_home, gate.options_of, 0.0), path, lambda _part, gate=gate: gate.open())
        _, whole = answered(app_of(page_home, gate.options_of, 300.0), path, lambda _part: None)
        assert re.sub(r'<div class="waiting">.*?</div>\n</div>\n', "", "".join(late), flags=re.DOTALL) == whole[0]


def test_filter_can_be_used_while_the_rows_are_awaited(page_home: Path) -> None:
    gate = Gate()
    path = f"/dags/{DAG_ID}/rollouts?iteration=2&region=atlantis&reward_min=0.25&version=2"
    _, parts = answered(app_of(page_home, gate.options_of, 0.0), path, lambda _part: gate.open())
    form = parts[0].partition("<form")[2].partition("</form>")[0]
    assert re.findall(r'name="(iteration|reward_min|version)"[^>]*value="([^"]*)"', form) == [
        ("iteration", "2"), ("reward_min", "0.25"), ("version", "2"),
    ]  # fmt: skip
    assert re.findall(r'<option value="([a-z]*)"( selected)?>(?:virginia|ohio|atlantis)', form) == [
        ("virginia", ""), ("ohio", ""), ("atlantis", " selected"),
    ]  # fmt: skip


def test_why_there_are_no_facts_is_said_in_a_page_that_is_under_way(page_home: Path) -> None:
    path = f"/dags/{DAG_ID}/rollouts?iteration=99"
    in_time = TestClient(app_of(page_home, lambda _entry, _region: {}, 300.0))
    status, said = sentence(in_time, path)
    assert status == 404
    gate = Gate()
    status, parts = answered(app_of(page_home, gate.options_of, 0.0), path, lambda _part: gate.open())
    assert status == 200
    assert f'<p class="sentence" role="alert">{said}</p>\n</main>' in "".join(parts[1:])


def test_address_that_can_not_be_used_is_refused_before_anything_is_sent(page_home: Path) -> None:
    app = app_of(page_home, Gate().options_of, 0.0)
    for path, expected in ((f"/dags/{DAG_ID}/rollouts?page=0", 400), ("/dags/motley__nope/run", 404)):
        status, parts = answered(app, path, lambda _part: None)
        assert (status, 'role="alert"' in parts[0]) == (expected, True)


def test_fault_that_nobody_foresaw_is_said_and_logged(page_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_entry: Any, _region: str) -> dict[str, Any]:
        raise RuntimeError("a fault of a library, with a password")

    status, parts = answered(app_of(page_home, broken, 0.0), f"/dags/{DAG_ID}/run", lambda _part: None)
    assert status == 200
    assert "This page could not be made" in "".join(parts)
    assert "password" not in "".join(parts)
    assert "a fault of a library" in caplog.text
    with pytest.raises(RuntimeError, match="a fault of a library"):
        TestClient(app_of(page_home, broken, 300.0)).get(f"/dags/{DAG_ID}/run")
