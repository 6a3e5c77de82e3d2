"""Who trains together in an iteration: the members of a gang say so in the run's store, one epoch after the other.

An epoch is one try of all machines of a training task together. Each machine has one document per epoch, which only its
own stage writes. Whoever finds itself in the newest epoch already, or that epoch ended, begins the next one; two that
begin it at once write the same thing. So no decision between writers is needed, and any store will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from storage.documents import json_bytes, model_bytes, read_model
from storage.errors import ObjectMissingError
from storage.layout import gang_epoch, gang_member, gangs_folder
from storage.leases import live_leases
from storage.policies import head_version
from storage.store import Store

MEMBER_FORMAT = "motley.gang-member/1"


class GangMember(BaseModel):
    """What one machine says of itself in one epoch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.gang-member/1"] = "motley.gang-member/1"
    """Kind and version of this document."""
    machine: str
    """The machine."""
    attempt: str
    """Attempt of its stage."""
    inputs: str
    """SHA-256 of what it would train on; all members must have the same."""
    address: str
    """Address at which the other machines reach it."""
    port: int
    """Port of the ranks' store, if this machine hosts it."""
    engine: str | None = None
    """Gang that a live training engine of this machine belongs to; None = it has none."""
    state: Literal["joined", "failed", "done"] = "joined"
    """Where it stands."""
    beat: int = 0
    """Grows as long as its stage lives."""
    failure: Mapping[str, Any] | None = None
    """Class, message and attributes of what failed; `is_of_peer`: whether it only lost another machine."""


def newest_epoch(store: Store, run: str, iteration: int, task: str, *, known: int = 0) -> int:
    """Return the newest epoch that has begun, 0 where none has.

    Args:
        store: Store of the home region.
        run: Run name.
        iteration: Iteration.
        task: Training task.
        known: An epoch that has begun.
    """
    epoch = known
    while store.exists(gang_epoch(run, iteration, task, epoch + 1)):
        epoch += 1
    return epoch


def begin_epoch(store: Store, run: str, iteration: int, task: str, epoch: int, machines: Sequence[str]) -> None:
    """Begin an epoch, or find it begun."""
    key = gang_epoch(run, iteration, task, epoch)
    store.create(key, json_bytes({"format": "motley.gang/1", "machines": list(machines)}, key))


def read_members(
    store: Store, run: str, iteration: int, task: str, epoch: int, machines: Sequence[str]
) -> dict[str, GangMember]:
    """Return what the machines that are in an epoch say, by machine."""
    found = {}
    for machine in machines:
        try:
            key = gang_member(run, iteration, task, epoch, machine)
            found[machine] = read_model(store, key, GangMember, MEMBER_FORMAT)
        except ObjectMissingError:
            continue
    return found


def join_epoch(store: Store, run: str, iteration: int, task: str, epoch: int, member: GangMember) -> bool:
    """Enter an epoch; return False where the machine is in it already."""
    key = gang_member(run, iteration, task, epoch, member.machine)
    return store.create(key, model_bytes(member, key))


def update_member(store: Store, run: str, iteration: int, task: str, epoch: int, member: GangMember) -> None:
    """Replace what a machine says of itself; by its own stage only."""
    key = gang_member(run, iteration, task, epoch, member.machine)
    store.publish(key, model_bytes(member, key))


def remove_gangs(store: Store, run: str, iterations: Iterable[int], now: datetime) -> list[str]:
    """Delete what gangs said of committed iterations, which nobody needs any more; return the deleted keys.

    The documents of an iteration stay while an attempt lives that is in one of its gangs.

    Args:
        store: Store of the home region.
        run: Run name.
        iterations: Those to look at; what is not committed yet is left alone.
        now: Current time, UTC, injected.

    Raises:
        CorruptObjectError: A lease, the head or a member can't be read; nothing of that iteration is deleted then.
    """
    head = head_version(store, run)
    living = {attempt for held in live_leases(store, run, now) for attempt in held.attempts}
    deleted = []
    for iteration in iterations:
        # Iteration k makes version k + 1.
        if head is None or iteration >= head:
            continue
        folder = gangs_folder(run, iteration)
        keys = [info.key for info in store.list(folder)]
        members = [key for key in keys if key.removeprefix(f"{folder}/").count("/") == 2]
        if living.isdisjoint(read_model(store, key, GangMember, MEMBER_FORMAT).attempt for key in members):
            deleted += [key for key in keys if store.delete(key)]
    return deleted
