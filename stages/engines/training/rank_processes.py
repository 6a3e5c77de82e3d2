"""The other ranks of a training engine: child processes that do what the first does, and how their failures surface.

The engine's first rank (rank 0, or the first one of its machine in a gang) lives in its own process. Every call is sent
to each child over a private socket pair, then all ranks run it together; each child answers with `done` or with its
failure. A failure of one rank ends its process, which breaks the collective the others wait in, so nobody hangs. The
earliest failure is the cause that the caller sees.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from stages.engines.training.rank_model import TrainerSettings
from stages.engines.training.rank_place import RankPlace
from stages.engines.training.rank_store import host_store, join_store
from stages.engines.training.trainer_kinds import TrainerKind
from stages.errors import EngineError, EngineUnavailableError

_LOGGER = logging.getLogger(__name__)
_REPORT_WAIT_S = 10.0
"""How long the others may take to say why they failed, once one rank has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """First message to a child."""

    kind: TrainerKind
    settings: TrainerSettings
    place: RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """A method of the trainer and its arguments."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A child's answer to one call."""

    failure: str | None = None
    """Class and message of the exception; None = done."""
    is_consistent: bool = False
    """Whether the exception is one that all ranks raise together, after which they can go on."""
    at_s: float = 0.0
    """`time.monotonic` of the failure; one clock for all processes of a machine."""


@dataclass(slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]
    report: RankReport | None = None

    def exit_text(self) -> str:
        """How the process ended and the end of what it wrote."""
        code = self.process.poll()
        how = (
            "is still running"
            if code is None
            else f"was killed by {_signal_name(-code)}"
            if code < 0
            else f"exited with code {code}"
        )
        tail = self._log_tail()
        return f"rank {self.rank} {how}" + (f"; its last output: {tail}" if tail else "")

    def _log_tail(self) -> str:
        text = Path(self.log.name).read_text(encoding="utf-8", errors="replace")
        return " | ".join(text.strip().splitlines()[-3:])


class RankProcesses:
    """The ranks of an engine but its first one."""

    def __init__(self, settings: TrainerSettings, place: RankPlace, kind: TrainerKind) -> None:
        """Start the children; `place` and `store` are then what the first rank joins with.

        Args:
            settings: What each rank is told.
            place: The first rank's place.
            kind: Which trainer the ranks run.

        Raises:
            EngineUnavailableError: Rank 0's store can't be made, or be reached.
            EngineError: It belongs to another gang.
        """
        self.store = host_store(place) if place.rank == 0 else join_store(place)
        self.place = replace(place, port=self.store.port)
        self._children: list[_Child] = []
        for rank in place.local_ranks[1:]:
            child = _start_child(rank, settings.threads)
            self._children.append(child)
            child.connection.send(RankStart(kind=kind, settings=settings, place=replace(self.place, rank=rank)))

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [child.process.pid for child in self._children]

    def send(self, call: RankCall) -> None:
        """Ask every child for a call; the first rank then does the same.

        Raises:
            EngineUnavailableError: A child is gone.
        """
        for child in self._children:
            child.report = None
            try:
                child.connection.send(call)
            except OSError:
                raise self._unavailable(child) from None

    def join(self) -> None:
        """Wait until every child is done with the call, after the first rank is.

        Raises:
            EngineError: A child failed.
            EngineUnavailableError: A child is gone.
        """
        self._collect(deadline_s=None)
        for child in self._children:
            if child.report is None:
                raise self._unavailable(child)
        failed = [child for child in self._children if child.report is not None and child.report.failure is not None]
        if failed:
            raise self._first_cause(failed, None)

    def explain(self, error: Exception, at_s: float) -> Exception | None:
        """Say what a failure of the first rank means, given what the children say.

        Args:
            error: What it raised.
            at_s: When, by `time.monotonic`.

        Returns:
            None when all ranks raised the same error together and the engine can go on; else the error to raise.
        """
        self._collect(deadline_s=time.monotonic() + _REPORT_WAIT_S)
        reports = [child.report for child in self._children]
        if all(report is not None and report.is_consistent for report in reports):
            return None
        killed = [child for child in self._children if child.report is None and child.process.poll() is not None]
        if killed:
            return self._unavailable(killed[0])
        failed = [
            child for child in self._children
            if child.report is not None and child.report.failure is not None and child.report.at_s <= at_s
        ]  # fmt: skip
        if failed:
            return self._first_cause(failed, error)
        cause = f"{type(error).__name__}: {error}"
        first = self.place.rank
        return EngineError(f"training rank {first} of {self.place.num_ranks} failed: {cause}", rank=first, cause=cause)

    def close(self) -> None:
        """End all children: ask, then kill."""
        for child in self._children:
            child.connection.close()
        for child in self._children:
            try:
                child.process.wait(timeout=_REPORT_WAIT_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.log.close()
            Path(child.log.name).unlink(missing_ok=True)
        self._children.clear()

    def kill(self) -> None:
        """End all children at once; what they were doing is void."""
        for child in self._children:
            child.process.kill()
        self.close()

    def _collect(self, deadline_s: float | None) -> None:
        """Take the reports of all children that still live, until the deadline."""
        pending = {child.connection: child for child in self._children if child.report is None}
        while pending:
            timeout = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            ready = wait(list(pending), timeout)
            if not ready:
                return
            for connection in ready:
                child = pending.pop(connection)  # type: ignore[call-overload]  # `wait` is typed for sockets too
                try:
                    child.report = child.connection.recv()
                except (EOFError, OSError):
                    child.process.wait()
                else:
                    if child.report.failure is not None and not child.report.is_consistent:
                        # The others may wait for it in a collective until it is gone.
                        child.process.wait(timeout=_REPORT_WAIT_S)

    def _first_cause(self, failed: Sequence[_Child], error: Exception | None) -> EngineError:
        first = min(failed, key=lambda child: child.report.at_s if child.report is not None else 0.0)
        cause = first.report.failure if first.report is not None else None
        return EngineError(
            f"training rank {first.rank} of {self.place.num_ranks} failed: {cause}",
            rank=first.rank,
            cause=cause,
            first_rank=None if error is None else f"{type(error).__name__}: {error}",
        )

    def _unavailable(self, child: _Child) -> EngineUnavailableError:
        child.process.wait(timeout=_REPORT_WAIT_S)
        return EngineUnavailableError(
            f"a training rank is gone: {child.exit_text()}; start the engine again", rank=child.rank,
            exit_code=child.process.poll(),
        )  # fmt: skip


def _start_child(rank: int, threads: int) -> _Child:
    ours, theirs = socket.socketpair()
    log = tempfile.NamedTemporaryFile(prefix=f"motley-rank-{rank}-", suffix=".log", delete=False)  # noqa: SIM115
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment["PYTHONPATH"] = os.pathsep.join(path or "." for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.engines.training.rank_worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    theirs.close()
    _LOGGER.info("training rank %d is process %d", rank, process.pid)
    return _Child(rank=rank, process=process, connection=Connection(ours.detach()), log=log)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
