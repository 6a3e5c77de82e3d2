"""The gang: the stages of several machines that train one model together.

Each machine of the plan's training task has a stage process and an engine of its own. They agree on an epoch in the
run's store (`storage.gangs`), then their engines' ranks meet at the first machine (torch's TCPStore) and train as one
group. A gang is whole or it doesn't train: a member that fails, dies or starts again ends the epoch for all, with the
first cause, and every machine's next attempt starts from the last committed policy in a new epoch.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pydantic import JsonValue

from plans.spec.cluster import Machine
from plans.workflow import RlTask
from stages.engines.gang_place import GangPlace
from stages.errors import ContractError, DeadlineError, EngineError, EngineUnavailableError, StageError
from stages.failures import failure_record
from stages.gang_layout import GangLayout, gang_layout
from stages.gang_watch import GangBoard, GangWatch
from storage.errors import StorageError
from storage.gangs import GangMember, begin_epoch, join_epoch

if TYPE_CHECKING:
    from stages.context import StageContext

_REPORT_WAIT_S: Final = 20.0
"""How long another member may take to say why it failed, once this one has lost its connection to it."""
_PEER_LOSS: Final = re.compile(r"gloo/transport|NCCL|Dist(Backend|Network|Store)?Error|[Cc]onnection (closed|reset)")
"""What torch says when a process of another machine is gone; it has no class of its own for gloo."""


def gang_of(context: StageContext, task: RlTask, engine: str) -> Gang | None:
    """Return the gang that this stage belongs to; None where the plan trains on one machine.

    Raises:
        ContractError: This machine is none of the plan's, or a machine has no address.
    """
    layout = gang_layout(context.plan.tasks[task], engine)
    if len(layout.machines) == 1:
        return None
    if context.machine.name not in layout.machines:
        raise ContractError(
            f"plan {context.plan_number} does {task.value} on {', '.join(layout.machines)}, but this is "
            f"{context.machine.name}; run the stage on those machines."
        )
    nameless = [name for name in layout.machines if _machine(context, name).address is None]
    if nameless:
        raise ContractError(
            f"plan {context.plan_number} does {task.value} on {', '.join(layout.machines)} together, but the cluster "
            f"file gives {', '.join(nameless)} no address at which the others could reach it; add machines[].address, "
            "or plan training onto one machine."
        )
    return Gang(context, task, layout)


class Gang:
    """One attempt of this machine's stage to train with the others."""

    def __init__(self, context: StageContext, task: RlTask, layout: GangLayout) -> None:
        self._context, self._layout = context, layout
        self._me = context.machine.name
        self._board = GangBoard(
            store=context.home, run=context.run.name, iteration=context.iteration, task=task.value,
            machines=layout.machines,
        )  # fmt: skip
        self._watch: GangWatch | None = None
        self._told: StageError | None = None
        self.place: GangPlace | None = None
        """Where this machine's engine stands; known once all have joined."""

    @property
    def is_lead(self) -> bool:
        """Whether this machine publishes what the gang trained."""
        return self._me == self._layout.lead

    @property
    def epoch(self) -> int:
        """Epoch of the attempt."""
        return self._board.epoch

    def facts(self) -> dict[str, JsonValue]:
        """Return what the iteration's record says of the gang."""
        return {"epoch": self.epoch, "machines": [*self._layout.machines]}

    @contextmanager
    def joined(self, inputs: str, is_settled: Callable[[], bool]) -> Iterator[bool]:
        """Join the others for the block; gives False at once where the work turns out to be done.

        An error that leaves the block ends the epoch for all; what is raised is the first cause, also where that was
        on another machine.

        Args:
            inputs: SHA-256 of what is trained on.
            is_settled: Whether the work is done, by an earlier epoch.

        Raises:
            DeadlineError: A member did not come in time; it is named.
            ContractError: Another member would train on something else.
            StageError: The first cause of another member's failure.
        """
        try:
            is_formed = self._join(inputs, is_settled)
            yield is_formed
        except BaseException as error:
            cause = self._first_cause(error) if isinstance(error, Exception) else error
            self._leave(cause, is_own=cause is error and error is not self._told)
            if cause is error:
                raise
            raise cause from error
        self._say(state="done")
        self._stop()

    def wait_for_lead(self, is_settled: Callable[[], bool]) -> None:
        """Wait until the lead has published.

        Raises:
            StageError: Why it will not.
        """
        self._require_whole()
        watch = self._watching()
        watch.judge_only({self._layout.lead})
        while not self._has_lead_published() and not is_settled():
            self._require_whole()
            time.sleep(watch.poll_s)

    def _has_lead_published(self) -> bool:
        # What gangs said of a committed iteration may be gone.
        lead = self._board.members().get(self._layout.lead)
        return lead is not None and lead.state == "done"

    def may_publish(self) -> None:
        """Say that the others' part is done; from now on their absence is no matter.

        Raises:
            StageError: The gang broke up before that.
        """
        self._require_whole()
        self._watching().judge_only(())

    def _join(self, inputs: str, is_settled: Callable[[], bool]) -> bool:
        limits = self._context.job.limits
        ends_at = time.monotonic() + limits.gang_wait_s
        with self._context.phase("gang"):
            while True:
                self._enter(inputs)
                members = self._wait_for_all(ends_at, is_settled)
                if members is None:
                    return False
                if len(members) == len(self._layout.machines):
                    break
                self._stop()  # a newer epoch has begun: go there
        if other := next((m for m in members.values() if m.inputs != inputs), None):
            raise ContractError(
                f"{other.machine} would train iteration {self._context.iteration} on other data or weights (inputs "
                f"{other.inputs[:12]}) than {self._me} ({inputs[:12]}); both must see the same committed rollouts and "
                "the same job."
            )
        self.place = self._place_of(members)
        self._context.log("gang", epoch=self.epoch, machines=",".join(self._layout.machines), token=self.place.token)
        return True

    def _enter(self, inputs: str) -> None:
        """Enter the newest epoch, or a new one where this machine was in it already or it has ended."""
        board, live = self._board, self._context.engines.live_gang(self._layout)
        machine = self._context.machine
        member = GangMember(
            machine=self._me, attempt=self._context.request.attempt, inputs=inputs, address=str(machine.address),
            port=_rendezvous_port(machine) if self.is_lead else 0, engine=None if live is None else live.token,
        )  # fmt: skip
        while True:
            board = replace(board, epoch=board.newest_epoch())
            members = board.members()
            if self._me in members or any(each.state != "joined" for each in members.values()):
                board = replace(board, epoch=board.epoch + 1)
            begin_epoch(board.store, board.run, board.iteration, board.task, board.epoch, board.machines)
            if join_epoch(board.store, board.run, board.iteration, board.task, board.epoch, member):
                break
        self._board = board
        end_engines = self._context.engines.end_gang
        self._watch = GangWatch(board, member, lost_s=self._context.job.limits.gang_lost_s, end_engine=end_engines)

    def _wait_for_all(self, ends_at: float, is_settled: Callable[[], bool]) -> Mapping[str, GangMember] | None:
        """Return the members when all are there, fewer when a newer epoch began; None when the work is done."""
        watch = self._watching()
        while True:
            members = self._board.members()
            if (failure := self._board.failure(members, but=self._me)) is not None:
                self._told = failure
                raise failure
            if len(members) == len(self._layout.machines):
                return members
            if self._board.newest_epoch() > self.epoch:
                return members
            if is_settled():
                return None
            if time.monotonic() > ends_at:
                raise self._missing(members)
            time.sleep(watch.poll_s)

    def _missing(self, members: Mapping[str, GangMember]) -> DeadlineError:
        missing = [name for name in self._layout.machines if name not in members]
        waited_s = self._context.job.limits.gang_wait_s
        queues = ", ".join(_machine(self._context, name).queue_name for name in missing)
        return DeadlineError(
            f"{', '.join(missing)} did not join the training gang of iteration {self._context.iteration} within "
            f"{waited_s:.0f} s (epoch {self.epoch}; {', '.join(members)} waited), so nothing was trained; look whether "
            f"the task {self._context.request.stage}.{queues} runs in Airflow and a worker serves queue {queues}, or "
            "raise limits.gang_wait_s",
            machines=missing, waited_s=waited_s, epoch=self.epoch,
        )  # fmt: skip

    def _place_of(self, members: Mapping[str, GangMember]) -> GangPlace:
        """Return the engines' place: that of the engines that live in all machines, or a fresh one."""
        live = self._context.engines.live_gang(self._layout)
        tokens = {member.engine for member in members.values()}
        if live is not None and tokens == {live.token}:
            return live
        self._context.engines.end_gang()
        lead = members[self._layout.lead]
        return GangPlace(
            token=f"{self._board.run}/{self._board.iteration}/{self._board.task}/{self.epoch}/{lead.attempt}",
            machines=self._layout.machines,
            ranks=self._layout.ranks,
            host=lead.address,
            port=lead.port,
            address=members[self._me].address,
        )

    def _first_cause(self, error: Exception) -> Exception:
        if self._watch is None or error is self._told:
            return error
        ends_at = time.monotonic() + (_REPORT_WAIT_S if is_peer_loss(error) else 0.0)
        while self._watch.verdict is None and time.monotonic() < ends_at:
            time.sleep(self._watch.poll_s)
        if self._watch.verdict is None and is_peer_loss(error) and (quiet := self._watch.quiet()):
            silent = " and ".join(
                f"{name} has given no sign of life for {for_s:.0f} s" for name, for_s in quiet.items()
            )
            return EngineUnavailableError(
                f"{silent}, and its connection to the gang broke ({error})", machine=min(quiet)
            )
        return self._watch.verdict or error

    def _leave(self, cause: BaseException, *, is_own: bool) -> None:
        """End the epoch: say why first, then break the connections that the others wait in."""
        is_of_peer = not is_own or (isinstance(cause, Exception) and is_peer_loss(cause))
        self._say(state="failed", failure={**failure_record(cause), "is_of_peer": is_of_peer})
        self._stop()
        self._context.engines.end_gang()

    def _say(self, **changes: object) -> None:
        if self._watch is None:
            return
        try:
            self._watch.say(**changes)
        except StorageError as error:
            self._context.log("the others could not be told", changes=changes, error=error)

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _require_whole(self) -> None:
        if (verdict := self._watching().verdict) is not None:
            raise verdict

    def _watching(self) -> GangWatch:
        if self._watch is None:
            raise ContractError("this stage has joined no gang yet.")
        return self._watch


def is_peer_loss(error: Exception) -> bool:
    """Whether an error says no more than that a process of another machine is gone, so that the cause is there."""
    if not isinstance(error, EngineError | EngineUnavailableError | DeadlineError):
        return False
    return "machine" in error.attributes or bool(_PEER_LOSS.search(str(error)))


def _machine(context: StageContext, name: str) -> Machine:
    return next(machine for machine in context.run.cluster.machines if machine.name == name)


def _rendezvous_port(machine: Machine) -> int:
    """Return the port that the cluster file gives, or one that is free now; who takes it meanwhile costs an epoch."""
    if machine.rendezvous_port is not None:
        return machine.rendezvous_port
    try:
        with socket.create_server((str(machine.address), 0)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise StageError(
            f"{machine.name} can't listen on {machine.address} ({error}), the address that the cluster file gives it; "
            "correct machines[].address"
        ) from error
