from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from cli.deployment_ports import any_free, demand_free, is_free
from cli.errors import PortInUseError


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def test_free_port_is_given(taken: int) -> None:
    port = any_free([taken])
    assert port != taken
    assert is_free(port)
    assert demand_free(port) == port


def test_port_in_use_is_refused_with_its_holder_and_another_port(taken: int) -> None:
    assert not is_free(taken)
    with pytest.raises(
        PortInUseError,
        match=rf"port {taken} on 127\.0\.0\.1 is in use by .*pid {os.getpid()}.*; end that program, or .*--port \d+",
    ):
        demand_free(taken)
