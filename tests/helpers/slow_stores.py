"""Stores of a run that can't be opened until somebody says so: what a page does while it waits can be looked at."""

from __future__ import annotations

import threading
from typing import Any

from stages.run_entry import RunEntry


class Gate:
    """Gives the options of stores, as `plugins.pages.run_source.OptionsOf` does, once it is open."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self.num_waiting = 0

    def open(self) -> None:
        """Let everybody through, now and later."""
        self._is_open.set()

    def options_of(self, _entry: RunEntry, _region: str) -> dict[str, Any]:
        self.num_waiting += 1
        assert self._is_open.wait(120.0), "nobody opened the gate: the page waited for its facts before it was sent"
        return {}
