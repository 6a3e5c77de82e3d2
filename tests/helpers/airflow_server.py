"""An HTTP transport that answers like the few routes of Airflow's REST API that the command line uses.

Its answers have the fields that Airflow 3.3.2 gave; the system tests hold the real one against the same client.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from stages.home import iteration_of, logical_date_of


@dataclass
class AirflowServer:
    """State of one DAG on the server's side."""

    dag_id: str
    states: dict[int, str] = field(default_factory=dict)
    """State of the DAG run, by iteration."""
    tasks: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Task instances, by iteration."""
    summary: str = "4 iterations"
    is_paused: bool = False
    backfills: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request but those for a token."""
    is_down: bool = False

    def transport(self) -> httpx.MockTransport:
        """Return the transport for a client."""
        return httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        if self.is_down:
            raise httpx.ConnectError("refused")
        path = request.url.path
        if path == "/auth/token":
            return httpx.Response(201, json={"access_token": "t"})
        self.requests.append((request.method, path))
        if request.headers.get("Authorization") != "Bearer t" and path != "/api/v2/monitor/health":
            return httpx.Response(401, json={"detail": "no token"})
        body = json.loads(request.content) if request.content else {}
        return self._route(request, path.removeprefix("/api/v2"), body)

    def _route(self, request: httpx.Request, path: str, body: dict[str, Any]) -> httpx.Response:
        own = f"/dags/{self.dag_id}"
        match request.method, path:
            case "GET", "/monitor/health":
                names = ("metadatabase", "scheduler", "dag_processor", "triggerer")
                return httpx.Response(200, json={name: {"status": "healthy"} for name in names})
            case "GET", _ if path == own:
                return httpx.Response(200, json={"dag_id": self.dag_id, "timetable_summary": self.summary})
            case "PATCH", _ if path == own:
                self.is_paused = body["is_paused"]
                return httpx.Response(200, json={})
            case "PATCH", _ if path.startswith(f"{own}/dagRuns/run-"):
                self.states[int(path.rpartition("-")[2])] = body["state"]
                return httpx.Response(200, json={})
            case "GET", _ if path == f"{own}/dagRuns":
                return self._dag_runs(request)
            case "GET", _ if path.endswith("/taskInstances"):
                return httpx.Response(200, json={"task_instances": self.tasks.get(int(path.split("/")[-2][4:]), [])})
            case "GET", "/importErrors":
                return httpx.Response(200, json={"import_errors": [{"stack_trace": "Traceback\nKeyError: 'x'"}]})
            case "GET", "/backfills":
                return httpx.Response(200, json={"backfills": self.backfills})
            case "PUT", _ if path.endswith("/cancel"):
                for backfill in self.backfills:
                    backfill["completed_at"] = "2026-01-01T00:00:00Z"
                return httpx.Response(200, json={})
            case "POST", "/backfills":
                return self._backfill(body)
        return httpx.Response(404, json={"detail": "Not Found"})

    def _dag_runs(self, request: httpx.Request) -> httpx.Response:
        wanted = request.url.params.get_list("state")
        limit = int(request.url.params["limit"])
        offset = int(request.url.params.get("offset", 0))
        runs = [
            {
                "dag_run_id": f"run-{k}",
                "logical_date": logical_date_of(k).isoformat().replace("+00:00", "Z"),
                "state": state,
            }
            for k, state in sorted(self.states.items())
            if not wanted or state in wanted
        ]
        return httpx.Response(200, json={"dag_runs": runs[offset : offset + limit], "total_entries": len(runs)})

    def _backfill(self, body: dict[str, Any]) -> httpx.Response:
        if any(backfill["completed_at"] is None for backfill in self.backfills):
            return httpx.Response(409, json={"detail": "Another backfill is running"})
        from datetime import datetime

        k = iteration_of(datetime.fromisoformat(body["from_date"]))
        is_redone = self.states.get(k) in ("failed", None) or body["reprocess_behavior"] == "completed"
        self.states[k] = "queued" if is_redone else self.states[k]
        self.backfills.append({"id": len(self.backfills) + 1, "completed_at": None, **body})
        return httpx.Response(200, json=self.backfills[-1])


def task(task_id: str, state: str | None, try_number: int = 1, duration: float | None = 1.0) -> dict[str, Any]:
    """Return a task instance as the API gives it."""
    return {
        "task_id": task_id, "state": state, "try_number": try_number, "duration": duration, "start_date": None,
    }  # fmt: skip
