"""Pages whose frame does not wait for their facts: what is slow follows in the same answer, without a script."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Final

from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from plugins.pages.faults import PageError, page_error

PATIENCE_S: Final = 0.2
"""Time in which facts must be there to be sent in one piece with the frame, with the status that they have."""

_log: Final = logging.getLogger(__name__)

_UNBUFFERED: Final = {"X-Accel-Buffering": "no"}
"""Asks proxies to pass on what they have got: nginx and its like wait for the end otherwise."""


class ArrivingPage(Response):
    """An answer of a frame and its content.

    Content that is made within the patience is sent with the frame, and so is the error page of content that can't be
    shown, with its status. Otherwise the frame is sent, with a sentence that the rest is being read; content, or the
    sentence why there is none, follows as soon as it is known, and the style sheet hides the first sentence then. The
    status of such an answer is 200 whatever follows.
    """

    def __init__(
        self,
        *,
        start: str,
        waiting: str,
        content: Callable[[], str],
        sentence: Callable[[PageError], str],
        end: str,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Keep how the page is made.

        Args:
            start: The frame up to its content.
            waiting: What stands there as long as the content is awaited.
            content: Returns the content; runs in a thread, may read stores.
            sentence: Returns the content of a page that can't be shown.
            end: The frame after its content.
            patience_s: Time in which content must be there to be sent in one piece.
        """
        self._start, self._waiting, self._end = start, waiting, end
        self._content, self._sentence = content, sentence
        self._patience_s = patience_s
        self.background = None
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; raises what the content raised, as long as nothing is sent."""
        content = asyncio.ensure_future(run_in_threadpool(self._content))
        await asyncio.wait({content}, timeout=self._patience_s)
        if content.done():
            answer: Response = HTMLResponse(self._start + content.result() + self._end)
        else:
            answer = StreamingResponse(self._parts(content), media_type="text/html", headers=_UNBUFFERED)
        await answer(scope, receive, send)

    async def _parts(self, content: asyncio.Future[str]) -> AsyncIterator[str]:
        yield self._start + self._waiting
        try:
            yield await content
        except Exception as error:  # noqa: BLE001 - the frame is sent, so whatever it is has to be said in the page
            yield self._sentence(_said(error))
        yield self._end


def _said(error: Exception) -> PageError:
    """Return an error as what the page says; one that nobody foresaw goes to the server's log."""
    if (found := page_error(error)) is not None:
        return found
    _log.error("a page could not be made", exc_info=error)
    sentence = "This page could not be made: a fault of Motley, which the log of Airflow's API server names."
    return PageError(sentence, HTTPStatus.INTERNAL_SERVER_ERROR)
