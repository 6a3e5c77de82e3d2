"""One verifier process: started, asked with a deadline, killed and replaced when it hangs or dies.

Verifiers run in a process of their own, since signal.alarm works in a main thread only and a library that is stuck in C
code or in a regular expression can't be interrupted otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, Final, Self

from stages.errors import RewardError
from stages.rewards.spec import RewardsSpec

START_DEADLINE_S: Final = 120.0
"""Longest time for a verifier process to import its packages; sympy takes seconds on a busy machine."""


class VerifierTimeoutError(Exception):
    """No reply within the deadline; the process is gone."""


class VerifierDiedError(Exception):
    """The process ended before it replied."""


class VerifierProcess:
    """A verifier process, used by one thread at a time."""

    def __init__(self, spec: RewardsSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = -1
        self._replies = -1
        self._received = bytearray()

    def __enter__(self) -> Self:
        """Start the process."""
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.stop()

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Reply to one request; starts the process first if there is none.

        Raises:
            VerifierTimeoutError: No reply in time; the process has been killed.
            VerifierDiedError: The process ended; `str` says how.
            RewardError: The process can't be started.
        """
        if self._process is None:
            self._start()
        return self._exchange(json.dumps(request), deadline_s)

    def stop(self) -> None:
        """Kill the process and everything that it started; does nothing when there is none."""
        if self._process is None:
            return
        # Its session is its own, so this also ends what a verifier has forked.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._requests)
        os.close(self._replies)
        self._process = None
        self._received.clear()

    def _start(self) -> None:
        child_reads, self._requests = os.pipe()
        self._replies, child_writes = os.pipe()
        os.set_blocking(self._requests, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stages.rewards.child", str(child_reads), str(child_writes)],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_reads, child_writes),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self._handshake()

    def _handshake(self) -> None:
        try:
            reply = self._exchange(self._spec.model_dump_json(), START_DEADLINE_S)
        except (VerifierTimeoutError, VerifierDiedError) as error:
            raise RewardError(f"rewards: the verifier process didn't start: {error}") from error
        if "fault" in reply:
            self.stop()
            raise RewardError(f"rewards: {reply['fault']}")

    def _exchange(self, line: str, deadline_s: float) -> dict[str, Any]:
        end_s = time.monotonic() + deadline_s
        try:
            self._write(line.encode() + b"\n", end_s)
            return json.loads(self._read_line(end_s))  # type: ignore[no-any-return] # our own child's object
        except TimeoutError:
            self.stop()
            raise VerifierTimeoutError(f"no reply within {deadline_s} s") from None
        except (EOFError, BrokenPipeError):
            raise VerifierDiedError(self._how_it_ended()) from None

    def _write(self, data: bytes, end_s: float) -> None:
        while data:
            self._wait(self._requests, select.POLLOUT, end_s)
            data = data[os.write(self._requests, data) :]

    def _read_line(self, end_s: float) -> bytes:
        while b"\n" not in self._received:
            self._wait(self._replies, select.POLLIN, end_s)
            chunk = os.read(self._replies, 65536)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        return line

    @staticmethod
    def _wait(descriptor: int, event: int, end_s: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        # Rounded up: a poll of 0 ms would spin.
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000 + 1):
            raise TimeoutError

    def _how_it_ended(self) -> str:
        process = self._process
        if process is None:
            return "it was stopped"
        # It may have closed its pipe and still be alive; killing an ended process changes nothing.
        try:
            code = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.stop()
        if code is None:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
