"""HTTP over a Unix domain socket: health of an engine process, and calls into its queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stages.engines.call_queue import CallQueue
from stages.engines.launch import EngineRecord
from stages.engines.wire import URGENT_HEADER, encode_error
from stages.errors import StageError


def serve_in_thread(record: EngineRecord, calls: CallQueue) -> None:
    """Listen on the record's socket in a daemon thread."""
    with contextlib.suppress(FileNotFoundError):
        Path(record.socket).unlink()
    config = uvicorn.Config(
        build_app(record, calls), uds=str(record.socket), log_level="warning", access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, name="http", daemon=True).start()


def build_app(record: EngineRecord, calls: CallQueue) -> Starlette:
    """Return the application: `GET /health`, `POST /attach`, `POST /call/{method}`."""

    def state() -> dict[str, object]:
        return {
            "identity": record.identity,
            "pid": os.getpid(),
            "is_ready": calls.is_ready,
            "unusable_reason": calls.unusable_reason,
        }

    async def health(request: Request) -> Response:
        del request
        return JSONResponse(state())

    async def attach(request: Request) -> Response:
        del request
        calls.touch()
        return JSONResponse(state())

    async def call(request: Request) -> Response:
        body = await request.body()
        try:
            is_urgent = request.headers.get(URGENT_HEADER) == "1"
            answer = await asyncio.wrap_future(calls.submit(request.path_params["method"], body, is_urgent=is_urgent))
        except StageError as error:
            return Response(encode_error(error), status_code=500, media_type="application/json")
        return Response(answer, media_type="application/msgpack")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/attach", attach, methods=["POST"]),
            Route("/call/{method}", call, methods=["POST"]),
        ]
    )
