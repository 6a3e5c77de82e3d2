"""A server that gives every request the same answer, and counts them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Answering:
    """A running server."""

    port: int = 0
    requests: list[str] = field(default_factory=list)
    """Methods of the requests, in order."""

    def s3_options(self) -> dict[str, Any]:
        """Return the options with which fsspec takes it for an S3 server."""
        return {
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "key": "k",
            "secret": "s",
            "client_kwargs": {"region_name": "us-east-1"},
        }


@contextmanager
def http_answers(status: int, body: str) -> Iterator[Answering]:
    """Serve on a loopback port; every answer has that status and body (none to HEAD)."""
    answering = Answering()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answering.requests.append(self.command)
            data = b"" if self.command == "HEAD" else body.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    answering.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield answering
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
