"""A request that fails is made again by ``storage.retry`` alone: as many requests leave as it says, and no more."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.regions.tcp_proxy import Shape, TcpProxy, requests_of, tcp_proxy
from storage import multipart, s3_store
from storage.errors import TransientStorageError
from storage.retry import RetryingStore, RetryPolicy
from storage.store import Store, open_store
from tests.helpers.http_answers import http_answers
from tests.helpers.s3_server import S3Server, s3_server

pytestmark = pytest.mark.timeout(1800)

BUCKET, KEY = "rl", "run/a"
CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read_bytes(KEY),
    "read range": lambda store: store.read_range(KEY, 2, 3),
    "look up": lambda store: store.size(KEY),
    "write": lambda store: store.publish(KEY, b"new"),
    "list": lambda store: [*store.list("run")],
    "delete": lambda store: store.delete(KEY),
}
POLICY = RetryPolicy(max_tries=3, first_wait_s=0.01, max_wait_s=0.01, patience_s=3600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), BUCKET) as found:
        yield found


@pytest.fixture
def line(server: S3Server, tmp_path: Path) -> Iterator[TcpProxy]:
    (tmp_path / "journal").touch()
    with tcp_proxy(server.port, Shape(), tmp_path / "journal") as proxy:
        yield proxy


def opened(options: dict[str, Any], policy: RetryPolicy = POLICY, **config: Any) -> RetryingStore:
    """Open a store that waits hardly at all between tries; ``config`` is what a user asks of botocore."""
    given = {**options, "config_kwargs": config}
    return RetryingStore(open_store(f"s3://{BUCKET}/r", is_retrying=False, skip_instance_cache=True, **given), policy)


def silent(line: TcpProxy, store: Store) -> None:
    """Let the server say nothing from now on; the client is ready, so its time limits count requests only."""
    store.exists(KEY)
    line.shape.is_silent = True


def unanswered(line: TcpProxy, count: int) -> list[str]:
    """Return the paths of the requests that got no answer, when they are that many (or after a while)."""
    assert line.journal is not None
    deadline = time.monotonic() + 20
    while True:
        found = [str(one["path"]) for one in requests_of(line.journal) if one["status"] is None]
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.05)  # the proxy writes when a connection ends


@pytest.mark.parametrize("call", CALLS)
def test_silent_server_is_asked_as_often_as_the_policy_says(server: S3Server, line: TcpProxy, call: str) -> None:
    store = opened(server.options(line.port), read_timeout=2)
    silent(line, store)
    with pytest.raises(TransientStorageError, match=rf"s3://{BUCKET}/r/run.*127\.0\.0\.1:{line.port}.*asked 3 times"):
        CALLS[call](store)
    assert len(unanswered(line, 3)) == 3


@pytest.mark.parametrize("call", CALLS)
def test_cut_connection_is_made_anew_as_often_as_the_policy_says(server: S3Server, line: TcpProxy, call: str) -> None:
    line.shape.refuse = True
    with pytest.raises(TransientStorageError, match="asked 3 times"):
        CALLS[call](opened(server.options(line.port)))
    # The HTTP client connects once more, at once and without asking anybody, where a connection is cut.
    assert 3 <= line.num_refused <= 2 * 3


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable"), (429, "TooManyRequests")],
)
def test_failing_server_is_asked_as_often_as_the_policy_says(call: str, status: int, code: str) -> None:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    with http_answers(status, f"<Error><Code>{code}</Code><Message>m</Message></Error>") as failing:
        with pytest.raises(TransientStorageError, match="asked 3 times"):
            CALLS[call](opened(failing.s3_options()))
        assert len(failing.requests) == 3


def test_refusal_is_not_repeated() -> None:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    with http_answers(403, "<Error><Code>AccessDenied</Code><Message>m</Message></Error>") as failing:
        for call in ("read range", "write", "list"):
            before = len(failing.requests)
            with pytest.raises(Exception, match="may not do this"):
                CALLS[call](opened(failing.s3_options()))
            assert len(failing.requests) == before + 1


@pytest.mark.parametrize("patience_s", [0.1, 3.0])
def test_silent_server_is_asked_twice_when_patience_is_over(
    server: S3Server, line: TcpProxy, patience_s: float
) -> None:
    store = opened(server.options(line.port), RetryPolicy(max_tries=50, patience_s=patience_s), read_timeout=2)
    silent(line, store)
    with pytest.raises(TransientStorageError, match="asked 2 times"):
        store.read_range(KEY, 0, 1)
    assert len(unanswered(line, 2)) == 2


def test_server_that_takes_no_part_of_a_file_is_asked_as_often_as_the_policy_says(
    server: S3Server, line: TcpProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(s3_store, "SLOWEST_BYTES_PER_S", 1 << 30)
    store, large = opened(server.options(line.port), read_timeout=4), tmp_path / "large"
    large.write_bytes(b"x" * (3 << 20))
    inner: Any = store._store
    begin = inner.begin_upload

    def begin_and_fall_silent(key: str) -> str:
        upload: str = begin(key)
        line.shape.is_silent = True
        return upload

    monkeypatch.setattr(inner, "begin_upload", begin_and_fall_silent)
    store.exists(KEY)
    with pytest.raises(TransientStorageError, match=r"did not take 1048576 bytes within 4\.0 s.*asked 3 times"):
        store.publish_file(KEY, large)
    parts = Counter(path for path in unanswered(line, 9) if "partNumber" in path)
    assert max(parts.values()) == 3  # the others may be given up before


def test_users_own_options_of_the_client_win(server: S3Server, line: TcpProxy) -> None:
    own = {"mode": "legacy", "max_attempts": 1}  # once more
    policy = RetryPolicy(max_tries=2, first_wait_s=0.01, patience_s=3600)
    store = opened(server.options(line.port), policy, read_timeout=2, retries=own)
    silent(line, store)
    with pytest.raises(TransientStorageError, match="asked 2 times"):
        store.read_range(KEY, 0, 1)
    assert len(unanswered(line, 4)) == 4


def test_line_that_works_again_is_used_again(server: S3Server, line: TcpProxy) -> None:
    store = opened(server.options(line.port))
    line.shape.refuse = True

    waits: list[float] = []

    def mend(seconds: float) -> None:
        waits.append(seconds)
        line.shape.refuse = False

    RetryingStore(store._store, POLICY, mend).publish(KEY, b"content")
    assert (store.read_bytes(KEY), len(waits)) == (b"content", 1)
