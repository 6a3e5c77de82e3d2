"""Servers of tests, on loopback ports of their own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def served(command: Sequence[str], port: int, *, start_s: float = 240.0) -> Iterator[None]:
    """Run a server for as long as the block lasts.

    Args:
        command: What starts it.
        port: Where it answers.
        start_s: Seconds after which a server that has not started fails the test.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + start_s
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start: {' '.join(command)}")
            time.sleep(0.05)  # waiting for another process's port
        yield
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
