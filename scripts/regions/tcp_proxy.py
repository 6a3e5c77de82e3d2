"""A TCP proxy that is a long line: one-way delay, a rate, cut connections, and a journal of the S3 requests it passes.

In tests it runs on a thread (:func:`tcp_proxy`); as a process of its own it takes no time from what it measures:
``python -m scripts.regions.tcp_proxy --listen 127.0.0.1:9101 --target 10.77.0.2:9000 --delay-ms 30``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

Address = tuple[str, int]
"""Host and port."""

_BLOCK: Final = 256 << 10
_REQUEST: Final = re.compile(rb"(GET|HEAD|PUT|POST|PATCH|DELETE) (\S+) HTTP/1\.1\r\n")
_RANGE: Final = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)
_ANSWER: Final = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_DECODED_LENGTH: Final = re.compile(rb"\r\nx-amz-decoded-content-length: *(\d+)\r\n", re.IGNORECASE)


@dataclass(slots=True)
class Shape:
    """How the link behaves; may be changed while it runs."""

    delay_s: float = 0.0
    """One-way delay of either direction, seconds."""
    bytes_per_s: float | None = None
    """Rate of each direction, over all connections together."""
    cut_after_bytes: int | None = None
    """Bytes towards the client after which every open connection is cut, once; then it is ``None`` again."""
    refuse: bool = False
    """Cut every new connection at once."""
    is_silent: bool = False
    """Pass no answer on: the far end takes what is sent and seems to say nothing."""


@dataclass(slots=True)
class TcpProxy:
    """A running proxy."""

    port: int
    shape: Shape
    journal: Path | None = None
    """File that gets one JSON line per HTTP request when its answer begins, or the connection ends without one:
    ``method``, ``path``, ``length`` asked for (null = all of it), ``sent_bytes`` of its body, ``status`` (null = none)
    and ``received_bytes``, the answer's body as its head says (null = it does not say)."""
    num_bytes: int = 0
    """Bytes passed towards clients."""
    num_cuts: int = 0
    """Cuts made."""
    num_refused: int = 0
    """New connections that were cut at once."""
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _free_at: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Connection:
    """The request of a connection that waits for its answer, as its journal line so far."""

    waiting: dict[str, object] | None = None


@contextmanager
def tcp_proxy(target_port: int, shape: Shape | None = None, journal: Path | None = None) -> Iterator[TcpProxy]:
    """Run a proxy on a free loopback port to another loopback port, on a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy = TcpProxy(0, shape or Shape(), journal)
    serving = serve(proxy, ("127.0.0.1", 0), ("127.0.0.1", target_port))
    server = asyncio.run_coroutine_threadsafe(serving, loop).result(30)
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(_stop(proxy, server), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def serve(proxy: TcpProxy, listen: Address, target: Address) -> asyncio.Server:
    """Listen; every connection is passed on to the target."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if proxy.shape.refuse:
            proxy.num_refused += 1
            writer.transport.abort()
            return
        try:
            back_reader, back_writer = await asyncio.open_connection(*target, limit=_BLOCK)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, back_writer)
        proxy._writers += ends
        connection = _Connection()
        await asyncio.gather(
            _pump(proxy, reader, back_writer, "up", connection), _pump(proxy, back_reader, writer, "down", connection),
            return_exceptions=True,
        )  # fmt: skip
        _write(proxy, connection)
        for end in ends:
            end.close()
            with suppress(ValueError):  # a cut has emptied the list
                proxy._writers.remove(end)

    server = await asyncio.start_server(handle, *listen, limit=_BLOCK)
    proxy.port = server.sockets[0].getsockname()[1]
    return server


def requests_of(journal: Path) -> list[dict[str, object]]:
    """Return the lines of a proxy's journal: the requests that it has passed; a path has its query with it."""
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]


async def _pump(
    proxy: TcpProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str, connection: _Connection
) -> None:
    """Read at the link's rate; deliver each block a delay later, in order."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    delivery = asyncio.create_task(_deliver(queue, writer))
    try:
        while data := await reader.read(_BLOCK):
            sent_at = loop.time()
            if proxy.shape.bytes_per_s:
                sent_at = max(sent_at, proxy._free_at.get(way, 0.0)) + len(data) / proxy.shape.bytes_per_s
                proxy._free_at[way] = sent_at
                await asyncio.sleep(max(0.0, sent_at - loop.time()))
            if way == "up":
                _note_request(proxy, connection, data)
            elif proxy.shape.is_silent:
                continue
            else:
                _note_answer(proxy, connection, data)
                proxy.num_bytes += len(data)
                if proxy.shape.cut_after_bytes is not None and proxy.num_bytes >= proxy.shape.cut_after_bytes:
                    _cut(proxy)
                    return
            queue.put_nowait((sent_at + proxy.shape.delay_s, data))
    finally:
        queue.put_nowait((loop.time() + proxy.shape.delay_s, b""))
        with suppress(Exception):
            await delivery


def _note_request(proxy: TcpProxy, connection: _Connection, data: bytes) -> None:
    """Remember the request that begins with a block: HTTP clients begin each one with a write of its own."""
    found = _REQUEST.match(data)
    if proxy.journal is None or found is None:
        return
    _write(proxy, connection)
    head = _head(data)
    span = _RANGE.search(head)
    body = _DECODED_LENGTH.search(head) or _LENGTH.search(head)
    connection.waiting = {
        "method": found[1].decode(),
        "path": found[2].decode(errors="replace"),
        "length": None if span is None else int(span[2]) - int(span[1]) + 1,
        "sent_bytes": 0 if body is None else int(body[1]),
        "status": None,
        "received_bytes": None,
    }


def _note_answer(proxy: TcpProxy, connection: _Connection, data: bytes) -> None:
    """Journal the waiting request with the answer that begins with a block; `100 Continue` is none yet."""
    found = _ANSWER.match(data)
    if connection.waiting is None or found is None or int(found[1]) < 200:
        return
    length = _LENGTH.search(_head(data))
    has_body = connection.waiting["method"] != "HEAD" and int(found[1]) not in (204, 304)
    connection.waiting["status"] = int(found[1])
    connection.waiting["received_bytes"] = (None if length is None else int(length[1])) if has_body else 0
    _write(proxy, connection)


def _head(data: bytes) -> bytes:
    return data.partition(b"\r\n\r\n")[0] + b"\r\n"


def _write(proxy: TcpProxy, connection: _Connection) -> None:
    if proxy.journal is not None and connection.waiting is not None:
        with proxy.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(connection.waiting) + "\n")
    connection.waiting = None


async def _deliver(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, data = await queue.get()
        await asyncio.sleep(max(0.0, due - loop.time()))
        if not data:
            with suppress(OSError, RuntimeError):
                writer.write_eof()
            return
        writer.write(data)
        await writer.drain()


def _cut(proxy: TcpProxy) -> None:
    proxy.shape.cut_after_bytes = None
    proxy.num_cuts += 1
    for writer in proxy._writers:
        writer.transport.abort()
    proxy._writers.clear()


async def _stop(proxy: TcpProxy, server: asyncio.Server) -> None:
    server.close()
    for writer in proxy._writers:
        writer.transport.abort()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", type=_address, required=True, help="HOST:PORT")
    parser.add_argument("--target", type=_address, required=True, help="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--gbps", type=float, help="rate of each direction; default: none")
    parser.add_argument("--journal", type=Path, help="file for the requests that pass")
    given = parser.parse_args()
    rate = None if given.gbps is None else given.gbps * 1e9 / 8

    async def forever() -> None:
        proxy = TcpProxy(0, Shape(given.delay_ms / 1e3, rate), given.journal)
        server = await serve(proxy, given.listen, given.target)
        await server.serve_forever()

    asyncio.run(forever())


if __name__ == "__main__":
    main()
