"""The pages behind a real HTTP server in this process, for browsers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from plugins.page_mount import URL_PREFIX
from plugins.pages.access import Access
from plugins.pages.app import build_app
from plugins.pages.arriving import PATIENCE_S
from plugins.pages.run_source import OptionsOf, RunSource
from stages.home import MotleyHome


@contextmanager
def page_server(
    home: Path, access: Access, patience_s: float = PATIENCE_S, options_of: OptionsOf = lambda _entry, _region: {}
) -> Iterator[str]:
    """Serve the pages of a home where Airflow mounts them; give the address."""
    outer = FastAPI()
    outer.mount(URL_PREFIX, build_app(RunSource(MotleyHome(home), options_of), access, patience_s))
    server = uvicorn.Server(uvicorn.Config(outer, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60.0
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}{URL_PREFIX}"
    finally:
        server.should_exit = True
        thread.join(30.0)
