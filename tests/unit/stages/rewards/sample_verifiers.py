"""Functions that the tests name as python_callable rewards; they run in the verifier process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def length_of_answer(completion, answer, row, scale=1.0):
    return scale * len(completion) if answer is not None and row["environment"] else None


def judge_by_text(completion, answer, row, flag=None):
    """Behaves as the completion says, so that one batch can hold every kind of failure."""
    if completion == "hang":
        while True:
            pass
    if completion == "sleep":
        time.sleep(3600)
    if completion == "exit":
        os._exit(3)
    if completion == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise":
        raise RuntimeError("broken verifier")
    if completion == "print":
        print('{"result": {"value": 99}}')  # noqa: T201 - what this case is about
    if completion == "nothing":
        return None
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1"
    if completion == "once" and not Path(flag).exists():
        Path(flag).touch()
        os._exit(1)
    return completion == answer
