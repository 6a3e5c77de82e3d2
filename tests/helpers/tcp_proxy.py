"""A TCP proxy for tests and benchmarks: one-way delay, rate limit, and connections cut after so many bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_BLOCK = 256 << 10


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


@dataclass(slots=True)
class TcpProxy:
    """A running proxy."""

    port: int
    shape: Shape
    num_bytes: int = 0
    """Bytes passed towards clients."""
    num_cuts: int = 0
    """Cuts made."""
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _free_at: dict[str, float] = field(default_factory=dict)


@contextmanager
def tcp_proxy(target_port: int, shape: Shape | None = None) -> Iterator[TcpProxy]:
    """Run a proxy on a free loopback port to another loopback port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy = TcpProxy(0, shape or Shape())
    server = asyncio.run_coroutine_threadsafe(_serve(proxy, target_port), loop).result(30)
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(_stop(proxy, server), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def _serve(proxy: TcpProxy, target_port: int) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if proxy.shape.refuse:
            writer.transport.abort()
            return
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", target_port, limit=_BLOCK)
        except OSError:
            writer.transport.abort()
            return
        proxy._writers += [writer, back_writer]
        await asyncio.gather(
            _pump(proxy, reader, back_writer, "up"), _pump(proxy, back_reader, writer, "down"), return_exceptions=True
        )

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=_BLOCK)
    proxy.port = server.sockets[0].getsockname()[1]
    return server


async def _pump(proxy: TcpProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
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
            if way == "down":
                proxy.num_bytes += len(data)
                if proxy.shape.cut_after_bytes is not None and proxy.num_bytes >= proxy.shape.cut_after_bytes:
                    _cut(proxy)
                    return
            queue.put_nowait((sent_at + proxy.shape.delay_s, data))
    finally:
        queue.put_nowait((loop.time() + proxy.shape.delay_s, b""))
        with suppress(Exception):
            await delivery


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
