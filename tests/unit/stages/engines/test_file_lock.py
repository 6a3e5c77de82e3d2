"""Locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.engines.file_lock import exclusive, hold_exclusively
from stages.errors import DeadlineError, EngineUnavailableError


def test_held_lock_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_exclusively(path, "the engine"), pytest.raises(EngineUnavailableError, match=f"pid {os.getpid()}"):
        hold_exclusively(path, "the engine")
    hold_exclusively(path, "the engine").close()


def test_wait_ends_at_its_deadline_and_names_the_holder(tmp_path: Path) -> None:
    """[W1] Every wait has a deadline and names the peer."""
    path = tmp_path / "lock"
    with (
        hold_exclusively(path, "the engine"),
        pytest.raises(DeadlineError, match=f"the engine is held by pid {os.getpid()}"),
        exclusive(path, time.monotonic(), "the engine"),
    ):
        pytest.fail("the lock was held twice")


def test_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import os, sys; from pathlib import Path; from stages.engines.file_lock import hold_exclusively;"
        "held = hold_exclusively(Path(sys.argv[1]), 'x'); os._exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 1
    with exclusive(path, time.monotonic(), "the engine"):
        assert path.read_text() == str(os.getpid())
