"""Ports on the loopback interface: which are free, and who holds the others."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

from cli.errors import PortInUseError

PREFERRED_API_PORT = 8080
"""Taken when it is free and nobody asks for another one."""


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of the loopback interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def demand_free(port: int) -> int:
    """Return a port that was asked for.

    Raises:
        PortInUseError: somebody listens there; the message says who and what to do.
    """
    if is_free(port):
        return port
    raise PortInUseError(
        f"port {port} on 127.0.0.1 is in use by {holder_of(port)}; end that program, or choose another port with "
        f"`motley up --port {any_free([port])}`."
    )


def any_free(taken: Iterable[int] = ()) -> int:
    """Return a free port that is not among `taken`."""
    refused = set(taken)
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in refused:
            return port


def holder_of(port: int) -> str:
    """Return who listens on a port, as words for a message."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return "another program (this user may not see which)"
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            return _name(connection.pid)
    return "another program"


def _name(pid: int | None) -> str:
    if pid is None:
        return "a program of another user"
    try:
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}: {' '.join(process.cmdline())[:80]})"
    except psutil.Error:
        return f"process {pid}"
