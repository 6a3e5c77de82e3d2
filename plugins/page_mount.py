"""Where the pages hang in Airflow: their address, the tabs that lead to them, and an application loaded on demand.

Plugins are loaded by every process of Airflow, the pages are needed in the API server alone. What is registered is
therefore an ASGI callable that imports them at its first request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

URL_PREFIX: Final = "/motley"
"""Path of the pages below Airflow's own address."""

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class LazyPages:
    """The pages as an ASGI application that is imported when it is first asked for something."""

    def __init__(self) -> None:
        """Load nothing yet."""
        self._app: AsgiApp | None = None
        self._lock = asyncio.Lock()

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer a request."""
        if self._app is None:
            async with self._lock:
                if self._app is None:
                    self._app = await asyncio.to_thread(_load)  # imports take seconds; the server goes on meanwhile
        await self._app(scope, receive, send)


def _load() -> AsgiApp:
    from plugins.pages.app import deployed_app

    return deployed_app(os.environ)


def external_views(base_url: str) -> list[dict[str, str]]:
    """Return the tabs and the menu entry that lead to the pages.

    Args:
        base_url: Address of Airflow's UI (`[api] base_url`); its path comes before that of the pages.
    """
    start = urlsplit(base_url).path.rstrip("/") + URL_PREFIX
    dag = f"{start}/dags/{{DAG_ID}}"
    dag_run = f"{dag}/dag_runs/{{RUN_ID}}"
    return [
        {"name": "Motley run", "href": f"{dag}/run", "destination": "dag", "url_route": "motley_run"},
        {"name": "Motley plan", "href": f"{dag}/plan", "destination": "dag", "url_route": "motley_plan"},
        {
            "name": "Rollouts", "href": f"{dag_run}/rollouts", "destination": "dag_run",
            "url_route": "motley_rollouts",
        },
        {"name": "Plan", "href": f"{dag_run}/plan", "destination": "dag_run", "url_route": "motley_iteration_plan"},
        {
            "name": "Motley cluster", "href": f"{start}/cluster", "destination": "nav", "category": "browse",
            "url_route": "motley_cluster",
        },
    ]  # fmt: skip
