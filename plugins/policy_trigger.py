"""Waiting for a committed policy version without holding a worker slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from storage.errors import TransientStorageError
from storage.policies import head_version
from storage.store import open_store


class PolicyVersionTrigger(BaseTrigger):
    """Fires when a run's head policy has at least a version, or when the deadline passed.

    Reads the committed data and nothing else. The event's payload is `{"version": int | None, "is_reached": bool}`; an
    error of the store that will not go away by itself comes as `{"error": sentence}`.
    """

    def __init__(
        self,
        *,
        run: str,
        root: str,
        version: int,
        deadline_at: float,
        poll_interval_s: float = 1.0,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Keep the arguments.

        Args:
            run: Run name.
            root: Object-store root with the run's policies.
            version: Policy version to wait for.
            deadline_at: Unix time at which waiting ends, seconds.
            poll_interval_s: Seconds between two looks.
            storage_options: Options for opening the store.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's class has no annotations
        self.run_name = run
        self.root = root
        self.version = version
        self.deadline_at = deadline_at
        self.poll_interval_s = poll_interval_s
        self.storage_options = dict(storage_options or {})

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return class path and arguments, from which the triggerer makes the trigger again."""
        return (
            "plugins.policy_trigger.PolicyVersionTrigger",
            {
                "run": self.run_name,
                "root": self.root,
                "version": self.version,
                "deadline_at": self.deadline_at,
                "poll_interval_s": self.poll_interval_s,
                "storage_options": self.storage_options,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event."""
        found: int | None = None
        while True:
            try:
                found = await asyncio.to_thread(read_head_version, self.root, self.run_name, self.storage_options)
            except TransientStorageError as error:
                self.log.warning("head of run %s can't be read now: %s", self.run_name, error)
            except Exception as error:  # noqa: BLE001 - the triggerer's edge: the waiting task gets the sentence
                yield _event({"error": f"{type(error).__name__}: {error}"})
                return
            if found is not None and found >= self.version:
                yield _event({"version": found, "is_reached": True})
                return
            if time.time() >= self.deadline_at:
                yield _event({"version": found, "is_reached": False})
                return
            await asyncio.sleep(self.poll_interval_s)


def read_head_version(root: str, run: str, storage_options: dict[str, Any]) -> int | None:
    """Return the authoritative policy version of a run, None when it has no policy yet."""
    return head_version(open_store(root, **storage_options), run)


def _event(payload: dict[str, Any]) -> TriggerEvent:
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]  # Airflow's class has no annotations
