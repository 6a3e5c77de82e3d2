"""The part of Airflow's REST API that the command line uses.

Answers are plain dictionaries, as Airflow gives them; what is not there is None. Everything else that goes wrong is a
`DeploymentError` with a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx
import tenacity

from cli.errors import DeploymentError
from stages.home import logical_date_of

HEALTH_NAMES = ("metadatabase", "scheduler", "dag_processor", "triggerer")
"""What Airflow tells the health of."""

_PAGE = 1000
_CONFLICT = 409
_NOT_FOUND = 404
_REPEATABLE = frozenset({"GET", "PATCH", "PUT", "DELETE"})
"""Methods that may be sent twice: here each of them sets a state, and a POST makes something."""
_BUSY = frozenset({500, 502, 503, 504})
"""500 is also Airflow's answer while its database is locked by another process; the transaction is rolled back."""
_TRIES = 5
BACKFILL_WAIT_S = 60.0
"""Longest wait for a backfill that stands in the way to end by itself when nothing of it runs."""


class AirflowApi:
    """A client of one deployment."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
        first_wait_s: float = 1.0,
    ) -> None:
        """Keep the address; the first request fetches a token.

        Args:
            url: Address of the API server.
            timeout_s: Longest wait for one answer.
            transport: Another transport, for tests.
            first_wait_s: Longest wait before a request is repeated for the first time; later ones are up to 8 times it.
        """
        self._first_wait_s = first_wait_s
        self._client = httpx.Client(base_url=url, timeout=timeout_s, transport=transport)
        self._has_token = False

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def health(self) -> dict[str, str | None]:
        """Return the state of each component, `healthy` if it is; all None when the server does not answer."""
        try:
            answer = self._client.get("/api/v2/monitor/health", timeout=5.0)
            found = answer.json() if answer.status_code == httpx.codes.OK else {}
        except (httpx.HTTPError, ValueError):
            found = {}
        return {name: (found.get(name) or {}).get("status") for name in HEALTH_NAMES}

    def dag(self, dag_id: str) -> dict[str, Any] | None:
        """Return a DAG, None if Airflow has not parsed it."""
        return self._get(f"/api/v2/dags/{dag_id}")

    def queued_tasks(self, dag_id: str) -> list[dict[str, Any]]:
        """Return the task instances of a DAG that wait for a worker, in all DAG runs."""
        query = {"state": ["queued", "scheduled"], "limit": _PAGE}
        page = self._get(f"/api/v2/dags/{dag_id}/dagRuns/~/taskInstances", params=query)
        return [] if page is None else list(page["task_instances"])

    def num_versions(self, dag_id: str) -> int:
        """Return how many versions of a DAG Airflow has stored."""
        page = self._get(f"/api/v2/dags/{dag_id}/dagVersions", params={"limit": 1})
        return 0 if page is None else int(page["total_entries"])

    def workers(self) -> list[dict[str, Any]]:
        """Return the Edge workers that have ever reported themselves; none when there is no Edge executor."""
        page = self._get("/edge_worker/ui/worker")
        return [] if page is None else list(page["workers"])

    def set_worker_maintenance(self, name: str, *, comment: str | None) -> None:
        """Let a worker finish what it runs and take nothing new (with a comment), or take work again (None)."""
        path = f"/edge_worker/ui/worker/{name}/maintenance"
        if comment is None:
            self._send("DELETE", path)
        else:
            self._send("POST", path, json={"maintenance_comment": comment})

    def import_errors(self) -> list[dict[str, Any]]:
        """Return the errors of DAG files."""
        return list((self._get("/api/v2/importErrors") or {}).get("import_errors", []))

    def set_paused(self, dag_id: str, *, is_paused: bool) -> None:
        """Pause or unpause a DAG."""
        self._send("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": is_paused})

    def dag_runs(self, dag_id: str, states: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Return the DAG runs of a DAG by logical date: all, or those in one of some states."""
        found: list[dict[str, Any]] = []
        while True:
            query: dict[str, Any] = {
                "limit": _PAGE,
                "offset": len(found),
                "order_by": "logical_date",
                "state": list(states),
            }
            page = self._get(f"/api/v2/dags/{dag_id}/dagRuns", params=query)
            found += [] if page is None else page["dag_runs"]
            if page is None or not page["dag_runs"] or len(found) >= page["total_entries"]:
                return found

    def fail_run(self, dag_id: str, dag_run_id: str) -> None:
        """Mark a DAG run failed; its running tasks are ended."""
        self._send("PATCH", f"/api/v2/dags/{dag_id}/dagRuns/{dag_run_id}", json={"state": "failed"})

    def count_runs(self, dag_id: str, state: str) -> int:
        """Return the number of DAG runs in a state."""
        page = self._get(f"/api/v2/dags/{dag_id}/dagRuns", params={"limit": 1, "state": state})
        return 0 if page is None else int(page["total_entries"])

    def last_error_lines(self, dag_id: str, dag_run_id: str, task: dict[str, Any]) -> list[str]:
        """Return the error message of a task's last try from its log; empty when the log can't be read."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{dag_run_id}/taskInstances/{task['task_id']}/logs/{task['try_number']}"
        try:
            content = (self._get(path, params={"full_content": True}) or {}).get("content", [])
        except DeploymentError:
            return []
        details = [d for event in content if isinstance(event, dict) for d in event.get("error_detail") or []]
        return [f"{detail.get('exc_type')}: {detail.get('exc_value')}" for detail in details[-1:]]

    def task_instances(self, dag_id: str, dag_run_id: str) -> list[dict[str, Any]]:
        """Return the task instances of one DAG run."""
        page = self._get(f"/api/v2/dags/{dag_id}/dagRuns/{dag_run_id}/taskInstances", params={"limit": _PAGE})
        return [] if page is None else list(page["task_instances"])

    def active_backfills(self, dag_id: str) -> list[dict[str, Any]]:
        """Return the backfills of a DAG that have not completed."""
        page = self._get("/api/v2/backfills", params={"dag_id": dag_id, "limit": _PAGE})
        return [b for b in (page or {}).get("backfills", []) if b["completed_at"] is None]

    def cancel_backfill(self, backfill_id: int) -> None:
        """Cancel a backfill; its unstarted runs are marked failed."""
        self._send("PUT", f"/api/v2/backfills/{backfill_id}/cancel", allowed=(_CONFLICT,))

    def end_backfills(self, dag_id: str) -> None:
        """Make room for a backfill: Airflow takes one per DAG at a time.

        Raises:
            DeploymentError: one of them does not end.
        """
        deadline = time.monotonic() + BACKFILL_WAIT_S
        while active := self.active_backfills(dag_id):
            for backfill in active:
                self.cancel_backfill(backfill["id"])
            if time.monotonic() > deadline:
                raise DeploymentError(
                    f"backfill {active[0]['id']} of DAG {dag_id} does not end; end it in the UI and resume again."
                )
            time.sleep(0.5)

    def backfill_iteration(self, dag_id: str, iteration: int, *, is_success_redone: bool = False) -> dict[str, Any]:
        """Run one iteration again (or for the first time), in a slot of its own.

        Args:
            dag_id: DAG.
            iteration: Iteration.
            is_success_redone: Whether a DAG run that stands as successful is run again too.
        """
        return self.backfill_range(dag_id, iteration, iteration, is_success_redone=is_success_redone)

    def backfill_range(
        self, dag_id: str, first: int, last: int, *, is_success_redone: bool, max_active_runs: int = 1
    ) -> dict[str, Any]:
        """Run iterations again (or for the first time), in order.

        Args:
            dag_id: DAG.
            first: First iteration.
            last: Last iteration.
            is_success_redone: Whether DAG runs that stand as successful are run again too.
            max_active_runs: DAG runs at a time; a budget of the backfill's own.
        """
        body = {
            "dag_id": dag_id,
            "from_date": logical_date_of(first).isoformat(),
            "to_date": logical_date_of(last).isoformat(),
            "reprocess_behavior": "completed" if is_success_redone else "failed",
            "max_active_runs": max_active_runs,
            "run_on_latest_version": True,
        }
        # A backfill is there before its DAG runs are: a refused request may leave one that holds the DAG's only place.
        path, again = "/api/v2/backfills", lambda: self.end_backfills(dag_id)
        return dict(self._send("POST", path, json=body, before_repeat=again).json())

    def _get(self, path: str, params: dict[str, Any] | None = None) -> dict[str, Any] | None:
        answer = self._send("GET", path, params=params, allowed=(_NOT_FOUND,))
        return None if answer.status_code == _NOT_FOUND else dict(answer.json())

    def _send(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        json: dict[str, Any] | None = None,
        allowed: tuple[int, ...] = (),
        before_repeat: Callable[[], None] | None = None,
    ) -> httpx.Response:
        try:
            answer = self._patiently(method, path, params, json, before_repeat)
        except httpx.HTTPError as error:
            raise DeploymentError(
                f"Airflow at {self._client.base_url} does not answer {method} {path} ({type(error).__name__}: "
                f"{error}); look at "
                "`motley status`."
            ) from error
        if answer.is_error and answer.status_code not in allowed:
            raise DeploymentError(
                f"Airflow refused {method} {path} with status {answer.status_code}: {answer.text[:500]}"
            )
        return answer

    def _patiently(
        self,
        method: str,
        path: str,
        params: dict[str, Any] | None,
        json: dict[str, Any] | None,
        before_repeat: Callable[[], None] | None,
    ) -> httpx.Response:
        """Send, and send again what may be repeated while the server is busy: SQLite locked, a slow machine.

        A request that makes something may be repeated after `before_repeat` has undone what it may have made.
        """
        if method not in _REPEATABLE and before_repeat is None:
            return self._once(method, path, params, json)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda answer: answer.status_code in _BUSY)
            | tenacity.retry_if_exception_type(httpx.TimeoutException),
            stop=tenacity.stop_after_attempt(_TRIES),
            wait=tenacity.wait_random_exponential(multiplier=self._first_wait_s, max=8.0 * self._first_wait_s),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
            before_sleep=None if before_repeat is None else lambda _: before_repeat(),
        )
        answer: httpx.Response = retrying(self._once, method, path, params, json)
        return answer

    def _once(
        self, method: str, path: str, params: dict[str, Any] | None, json: dict[str, Any] | None
    ) -> httpx.Response:
        if not self._has_token:
            self._fetch_token()
        answer = self._client.request(method, path, params=params, json=json)
        if answer.status_code == httpx.codes.UNAUTHORIZED:  # tokens end after a day
            self._fetch_token()
            answer = self._client.request(method, path, params=params, json=json)
        return answer

    def _fetch_token(self) -> None:
        answer = self._client.get("/auth/token")
        if answer.is_error:
            raise DeploymentError(
                f"Airflow at {self._client.base_url} gives no token (status {answer.status_code}); is it a "
                "deployment of Motley?"
            )
        self._client.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"
        self._has_token = True
