"""A thread that says that this machine's stage lives, and looks whether the other members of the gang do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stages.errors import EngineUnavailableError, StageError
from stages.failures import recorded_error
from storage.errors import StorageError
from storage.gangs import GangMember, newest_epoch, read_members, update_member
from storage.store import Store

BEATS: Final = 6
"""Signs of life in the time after which silence counts as death."""
_MOST_POLL_S: Final = 2.0

logger = logging.getLogger("stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class GangBoard:
    """Where the members of a task's gang find each other: one epoch in the run's store."""

    store: Store
    run: str
    iteration: int
    task: str
    machines: Sequence[str]
    epoch: int = 0

    def members(self) -> dict[str, GangMember]:
        """Return what the members say, by machine."""
        return read_members(self.store, self.run, self.iteration, self.task, self.epoch, self.machines)

    def update(self, member: GangMember) -> None:
        """Say something else of this machine."""
        update_member(self.store, self.run, self.iteration, self.task, self.epoch, member)

    def newest_epoch(self) -> int:
        """Return the newest epoch that has begun."""
        return newest_epoch(self.store, self.run, self.iteration, self.task, known=self.epoch)

    def failure(self, members: Mapping[str, GangMember], but: str) -> StageError | None:
        """Return the first cause among the failures of other machines; None where none has failed of itself.

        A machine that only lost its connection to another one is no cause.
        """
        for machine in self.machines:
            failure = members[machine].failure if machine in members and machine != but else None
            if failure is not None and not failure.get("is_of_peer"):
                prefix = f"training of iteration {self.iteration} stopped on all machines because {machine} failed: "
                return recorded_error({**failure, "message": f"{prefix}{failure.get('message')}"}, machine=machine)
        return None


class GangWatch:
    """The thread; `stop` ends it."""

    def __init__(self, board: GangBoard, member: GangMember, *, lost_s: float, end_engine: Callable[[], None]) -> None:
        """Start it.

        Args:
            board: The epoch.
            member: What this machine said when it joined.
            lost_s: Seconds of silence after which a member counts as dead.
            end_engine: Ends this machine's engine of the gang, from another thread; frees the stage from a call that
                waits for a member that is gone.
        """
        self._board, self._member = board, member
        self._lost_s, self._end_engine = lost_s, end_engine
        self.poll_s = min(_MOST_POLL_S, lost_s / (2 * BEATS))
        self.verdict: StageError | None = None
        """Why the gang can't go on, found by this thread."""
        self._judged: Collection[str] = frozenset(board.machines) - {member.machine}
        self._is_whole = True
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._run, name="gang-watch", daemon=True)
        self._thread.start()

    def judge_only(self, machines: Collection[str]) -> None:
        """Let only these members matter from now on: the work that needs all is done."""
        self._judged, self._is_whole = frozenset(machines), False

    def quiet(self) -> dict[str, float]:
        """Return the members that have missed a sign of life, and for how many seconds each has been silent."""
        now, longest_s = time.monotonic(), 1.5 * self._lost_s / BEATS
        return {name: now - at for name, (_, at) in self._heard.items() if now - at > longest_s}

    def say(self, **changes: object) -> None:
        """Change what the others read of this machine."""
        with self._lock:
            self._member = self._member.model_copy(update=changes)
            self._board.update(self._member)

    def stop(self) -> None:
        """End the thread; the last thing said stays."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        said_at = time.monotonic()
        while not self._stopped.wait(self.poll_s):
            try:
                if time.monotonic() - said_at >= self._lost_s / BEATS:
                    self.say(beat=self._member.beat + 1)
                    said_at = time.monotonic()
                if self._judged and self.verdict is None:
                    self.verdict = self._judge()
            except StorageError as error:  # the store may answer again; silence is for the others to judge
                logger.warning("the gang's documents can't be read or written now: %s", error)
            if self.verdict is not None:
                self._end_engine()  # again and again: it may be starting

    def _judge(self) -> StageError | None:
        """Return why the gang can't go on, or None."""
        judged = self._judged
        members = {name: each for name, each in self._board.members().items() if name in judged}
        if (failure := self._board.failure(members, but=self._member.machine)) is not None:
            return failure
        if self._is_whole and (newest := self._board.newest_epoch()) > self._board.epoch:
            return EngineUnavailableError(
                f"a machine began epoch {newest} of the training gang while {self._member.machine} was in epoch "
                f"{self._board.epoch}, which is void: a member died and was started again; all start again",
                epoch=newest,
            )
        return self._silence(members)

    def _silence(self, members: Mapping[str, GangMember]) -> StageError | None:
        now = time.monotonic()
        for machine, member in members.items():
            beat, heard_at = self._heard.get(machine, (-1, now))
            if member.state != "joined" or member.beat != beat:
                self._heard[machine] = (member.beat, now)
            elif now - heard_at > self._lost_s:
                return EngineUnavailableError(
                    f"{machine} gave no sign of life for {now - heard_at:.0f} s while the gang trained iteration "
                    f"{self._board.iteration}; look at that machine, its Airflow worker and its way to the run's store",
                    machine=machine, silent_s=now - heard_at,
                )  # fmt: skip
        return None
