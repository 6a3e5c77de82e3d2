"""Keys of a real S3 server that may do only some things: what is said, that it is asked once, that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.regions.tcp_proxy import Shape, requests_of, tcp_proxy
from storage.errors import PermissionDeniedError, TransientStorageError
from storage.policies import head_version, publish_policy, resolve_policy
from storage.rollouts import read_rollouts, write_rollouts
from storage.store import Store, open_store
from tests.helpers.iam_server import IamServer, iam_server
from tests.helpers.s3_server import s3_server
from tests.helpers.storage_builders import RUN, policy_files, rollout_rows

pytestmark = pytest.mark.timeout(1800)

BUCKET = "rollouts"
READ, WRITE = ("s3:Get*", "s3:Head*", "s3:List*"), ("s3:Put*",)
RIGHTS = {"owner": ("s3:*",), "reader": READ, "writer": WRITE, "stranger": ()}
REMEDY = "may not do this; grant read, write, list and delete"

Calls = dict[str, Callable[[Store], object]]
READS: Calls = {
    "read": lambda store: store.read_bytes(f"{RUN}/a"),
    "look up": lambda store: store.size(f"{RUN}/a"),
    "list": lambda store: [*store.list(RUN)],
}
WRITES: Calls = {
    "write": lambda store: store.publish(f"{RUN}/b", b"new"),
    "delete": lambda store: store.delete(f"{RUN}/a"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[IamServer]:
    with iam_server(BUCKET, RIGHTS) as found:
        opened(found, "owner").publish(f"{RUN}/a", b"content")
        yield found


def opened(server: IamServer, user: str, port: int | None = None) -> Store:
    return open_store(f"s3://{BUCKET}/root", **server.options(user, port))


@pytest.mark.parametrize(
    ("user", "calls"),
    [("reader", WRITES), ("writer", READS), ("stranger", READS | WRITES)],
    ids=["may_not_write", "may_not_read", "may_nothing"],
)
def test_refusal_says_what_where_and_what_to_do_and_is_asked_once(
    server: IamServer, tmp_path: Path, user: str, calls: Calls
) -> None:
    before = {info.key: info.size for info in opened(server, "owner").list("")}
    for number, (action, call) in enumerate(calls.items()):
        journal = tmp_path / str(number)
        journal.touch()
        with tcp_proxy(server.port, Shape(), journal) as line, pytest.raises(PermissionDeniedError) as caught:
            call(opened(server, user, line.port))
        said = str(caught.value)
        # Deleting looks first whether the object is there.
        assert said.startswith(
            (f"cannot {action} s3://{BUCKET}/root/{RUN}", f"cannot look up s3://{BUCKET}/root/{RUN}")
        )
        assert REMEDY in said
        assert server.keys[user][1] not in said
        refused = [one for one in requests_of(journal) if one["status"] == 403]
        assert len(refused) == 1
    assert {info.key: info.size for info in opened(server, "owner").list("")} == before


def test_who_may_do_it_is_let(server: IamServer) -> None:
    assert opened(server, "reader").read_bytes(f"{RUN}/a") == b"content"
    opened(server, "writer").publish(f"{RUN}/w", b"new")
    assert opened(server, "reader").read_bytes(f"{RUN}/w") == b"new"


def test_commit_that_is_refused_leaves_nothing_visible(server: IamServer) -> None:
    owner, reader = opened(server, "owner"), opened(server, "reader")
    publish_policy(owner, RUN, 0, policy_files(0), created_by="t")
    before = {info.key for info in owner.list(RUN)}
    with pytest.raises(PermissionDeniedError, match=REMEDY):
        publish_policy(reader, RUN, 1, policy_files(1), created_by="t")
    with pytest.raises(PermissionDeniedError, match=REMEDY):
        write_rollouts(reader, RUN, 0, 0, 1, rollout_rows(range(2)), input_fingerprint="f", created_by="t")
    assert {info.key for info in owner.list(RUN)} == before
    assert (head_version(reader, RUN), resolve_policy(reader, RUN, 0).version) == (0, 0)


def test_what_may_not_be_read_is_not_taken_for_missing(server: IamServer) -> None:
    publish_policy(opened(server, "owner"), RUN, 0, policy_files(0), created_by="t")
    for user in ("writer", "stranger"):
        for call in (lambda store: resolve_policy(store, RUN, 0), lambda store: read_rollouts(store, RUN, 0)):
            with pytest.raises(PermissionDeniedError, match=REMEDY):
                call(opened(server, user))


def test_server_that_is_read_only_is_named_when_a_write_gets_no_answer(tmp_path: Path) -> None:
    """Rclone started with ``--read-only`` takes the head of a PUT and then says nothing, not even that it won't."""
    with s3_server(tmp_path, BUCKET, options=("--read-only",)) as read_only:
        options = {**read_only.options(), "skip_instance_cache": True, "config_kwargs": {"read_timeout": 2}}
        store = open_store(f"s3://{BUCKET}/root", **options)
        with pytest.raises(
            TransientStorageError, match=rf"127\.0\.0\.1:{read_only.port} .*read-only.*asked [0-9] times"
        ):
            store.publish(f"{RUN}/a", b"new")
        assert not store.exists(f"{RUN}/a")
