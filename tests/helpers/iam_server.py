"""An S3 server (moto) that knows users with different rights, on a loopback port."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers.loopback import free_port, served


@dataclass(frozen=True, slots=True)
class IamServer:
    """A running server; every request must be signed by one of its users, who may do what their rights say."""

    port: int
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Access key and secret by user."""

    def options(self, user: str, port: int | None = None) -> dict[str, Any]:
        """Return the options with which fsspec opens it as a user, directly or through a proxy's port."""
        key, secret = self.keys[user]
        return {
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "key": key,
            "secret": secret,
            "client_kwargs": {"region_name": "us-east-1"},
            "skip_instance_cache": True,
        }


@contextmanager
def iam_server(bucket: str, rights: Mapping[str, Sequence[str]], *, start_s: float = 240.0) -> Iterator[IamServer]:
    """Serve one bucket.

    Args:
        bucket: Its name.
        rights: Actions (``s3:GetObject``, ``s3:Put*``) that each user may do, by user.
        start_s: Seconds after which a server that has not started fails the test.
    """
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    port = free_port()
    with served([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, start_s=start_s):
        server = IamServer(port)
        _create(server, bucket, rights)
        yield server


def _create(server: IamServer, bucket: str, rights: Mapping[str, Sequence[str]]) -> None:
    import boto3

    def client(service: str) -> Any:
        return boto3.client(
            service, endpoint_url=f"http://127.0.0.1:{server.port}", region_name="us-east-1",
            aws_access_key_id="anybody", aws_secret_access_key="anything",
        )  # fmt: skip

    client("s3").create_bucket(Bucket=bucket)
    iam = client("iam")
    for user, actions in rights.items():
        iam.create_user(UserName=user)
        statement = {"Effect": "Allow", "Action": [*actions], "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        if actions:
            iam.put_user_policy(UserName=user, PolicyName="rights", PolicyDocument=document)
        made = iam.create_access_key(UserName=user)["AccessKey"]
        server.keys[user] = (made["AccessKeyId"], made["SecretAccessKey"])
    # From now on every request is checked.
    address = f"http://127.0.0.1:{server.port}/moto-api/reset-auth"
    plain = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(address, b"0", plain, method="POST"), timeout=60).close()
