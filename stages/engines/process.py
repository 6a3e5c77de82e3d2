"""Operating-system side of engine processes: alive or not, ended for good, end of a log."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

_START_TIME_TOLERANCE_S = 0.05
"""Start times of one process, read twice, differ by rounding only."""
_LOG_TAIL_LINES = 25
_TERMINATE_GRACE_S = 5.0
"""Time that a process gets between SIGTERM and SIGKILL."""


def find_process(pid: int, started_at: float) -> psutil.Process | None:
    """Return the live process of that pid and start time; None if it has ended or the pid belongs to another one."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started_at) < _START_TIME_TOLERANCE_S
        if same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return process
    except psutil.NoSuchProcess:
        return None
    return None


def end_process(process: psutil.Process) -> None:
    """End a process and its children: SIGTERM, then SIGKILL for what is left after a grace period."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=_TERMINATE_GRACE_S)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=_TERMINATE_GRACE_S)


def describe_exit(return_code: int) -> str:
    """Put a return code of `subprocess` into words."""
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return f"signal {signal.Signals(-return_code).name}"
    except ValueError:
        return f"signal {-return_code}"


def log_tail(path: Path, lines: int = _LOG_TAIL_LINES) -> str:
    """Return the last lines of a log; a sentence in place of a log that can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 200 * lines))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:])
