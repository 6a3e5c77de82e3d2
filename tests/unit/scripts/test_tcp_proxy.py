"""The journal of a line says of every request what was asked, what was sent and what came back."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.regions.tcp_proxy import Shape, requests_of, tcp_proxy

BODY = b"0123456789" * 100


class Handler(BaseHTTPRequestHandler):
    """Answers like an object store."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/silent":
            self.close_connection = True
            return
        is_missing = self.path == "/missing"
        body = b"" if is_missing else BODY[:10] if "Range" in self.headers else BODY
        self.send_response(404 if is_missing else 206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(30)


def lines_when(journal: Path, count: int) -> list[tuple[object, ...]]:
    """Return the journal when it has that many lines."""
    deadline = time.monotonic() + 60
    while len(found := requests_of(journal)) < count and time.monotonic() < deadline:
        time.sleep(0.02)  # the proxy writes on a thread of its own
    fields = ("method", "path", "length", "sent_bytes", "status", "received_bytes")
    return [tuple(line[field] for field in fields) for line in found]


def test_requests_of_one_connection_are_told_apart(port: int, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    with tcp_proxy(port, Shape(), journal) as line:
        client = http.client.HTTPConnection("127.0.0.1", line.port, timeout=60)
        for method, path, headers in (
            ("GET", "/all?versionId=null", {}), ("GET", "/part", {"Range": "bytes=5-14"}), ("HEAD", "/all", {}),
            ("GET", "/missing", {}),
        ):  # fmt: skip
            client.request(method, path, headers=headers)
            client.getresponse().read()
        client.request("PUT", "/new", body=b"x" * 77)
        client.getresponse().read()
        client.close()
        assert lines_when(journal, 5) == [
            ("GET", "/all?versionId=null", None, 0, 200, len(BODY)),
            ("GET", "/part", 10, 0, 206, 10),
            ("HEAD", "/all", None, 0, 200, 0),
            ("GET", "/missing", None, 0, 404, 0),
            ("PUT", "/new", None, 77, 200, 0),
        ]


def test_request_without_an_answer_is_journalled_as_such(port: int, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    with tcp_proxy(port, Shape(), journal) as line:
        client = http.client.HTTPConnection("127.0.0.1", line.port, timeout=60)
        client.request("GET", "/silent")
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            client.getresponse()
        client.close()
        assert lines_when(journal, 1) == [("GET", "/silent", None, 0, None, None)]
