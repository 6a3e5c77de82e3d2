"""Leases: who works on a run says what it reads and under which attempt it writes, so that retention spares that.

One document per holder, written by the holder only. A lease ends by itself, so a dead holder blocks nothing for
ever. The order makes races harmless: a reader first publishes its lease and then looks whether the version was
retired; retention first writes that a version is retired and then looks for leases. As every read sees the writes
before it, one of the two sees the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from storage.documents import model_bytes, read_model
from storage.errors import InvalidInputError, ObjectMissingError
from storage.layout import checkpoint_folder, critic_folder, lease, leases_folder, policy_folder, retention_ledger
from storage.manifest import find_valid
from storage.store import Store

LEASE_FORMAT = "motley.lease/1"
RETENTION_FORMAT = "motley.retention/1"


class Lease(BaseModel):
    """The document of one reader."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.lease/1"] = "motley.lease/1"
    """Kind and version of this document."""
    run: str
    """Run name."""
    holder: str
    """Who reads: machine, stage and process."""
    policy_versions: tuple[int, ...] = ()
    """Policy versions in use."""
    checkpoint_versions: tuple[int, ...] = ()
    """Resume points in use."""
    critic_versions: tuple[int, ...] = ()
    """Critics in use."""
    iterations: tuple[int, ...] = ()
    """Iterations whose rollouts and column families are in use."""
    attempts: tuple[str, ...] = ()
    """Attempts under which the holder may be writing data objects that no manifest names yet."""
    expires_at: AwareDatetime
    """When the lease ends by itself, UTC."""


class RetentionLedger(BaseModel):
    """The document ``retention.json``: artefacts that are about to be deleted."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.retention/1"] = "motley.retention/1"
    """Kind and version of this document."""
    retired: dict[str, AwareDatetime] = {}
    """When an artefact (by its folder) was retired, UTC; readers may not start using it. Empty between passes."""


def take_lease(
    store: Store,
    run: str,
    holder: str,
    *,
    expires_at: datetime,
    policy_versions: Iterable[int] = (),
    checkpoint_versions: Iterable[int] = (),
    critic_versions: Iterable[int] = (),
    iterations: Iterable[int] = (),
    attempts: Iterable[str] = (),
) -> Lease:
    """Say what the holder uses, or prolong and change what it said before.

    Args:
        store: Where.
        run: Run name.
        holder: Unique name of the reader; one writer per lease.
        expires_at: When the lease ends by itself, UTC.
        policy_versions: All policy versions in use (the former set is replaced).
        checkpoint_versions: All resume points in use.
        critic_versions: All critics in use.
        iterations: All iterations whose rollouts are in use.
        attempts: All attempts under which the holder writes.

    Raises:
        ObjectMissingError: A version is not committed, or is about to be deleted; the lease is not held then.
        InvalidInputError: ``expires_at`` has no time zone.
    """
    if expires_at.tzinfo is None:
        message = f"lease of {holder}: expires_at {expires_at} has no time zone; give UTC"
        raise InvalidInputError(message)
    held = Lease(
        run=run,
        holder=holder,
        policy_versions=tuple(sorted(set(policy_versions))),
        checkpoint_versions=tuple(sorted(set(checkpoint_versions))),
        critic_versions=tuple(sorted(set(critic_versions))),
        iterations=tuple(sorted(set(iterations))),
        attempts=tuple(sorted(set(attempts))),
        expires_at=expires_at,
    )
    key = lease(run, holder)
    store.publish(key, model_bytes(held, key))
    retired = read_ledger(store, run).retired
    lost = [folder for folder in leased_folders(held) if folder in retired or find_valid(store, folder) is None]
    if lost:
        store.delete(key)
        message = f"{store.url}: {', '.join(lost)} cannot be leased by {holder}: not committed or about to be deleted"
        raise ObjectMissingError(message, key=lost[0])
    return held


def release_lease(store: Store, run: str, holder: str) -> bool:
    """End a lease; return whether there was one."""
    return store.delete(lease(run, holder))


def live_leases(store: Store, run: str, now: datetime) -> list[Lease]:
    """Return all leases that have not ended.

    Raises:
        CorruptObjectError: A lease cannot be read; what it protects is unknown, so nothing may be deleted.
    """
    leases = []
    for info in store.list(leases_folder(run)):
        name = info.key.rpartition("/")[2]
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            found = read_model(store, info.key, Lease, LEASE_FORMAT)
        except ObjectMissingError:
            continue
        if found.expires_at > now:
            leases.append(found)
    return leases


def leased_folders(held: Lease) -> list[str]:
    """Return the artefact folders that a lease protects."""
    return [
        *(policy_folder(held.run, version) for version in held.policy_versions),
        *(checkpoint_folder(held.run, version) for version in held.checkpoint_versions),
        *(critic_folder(held.run, version) for version in held.critic_versions),
    ]


def read_ledger(store: Store, run: str) -> RetentionLedger:
    """Return the retention ledger; empty if nothing was ever retired."""
    try:
        return read_model(store, retention_ledger(run), RetentionLedger, RETENTION_FORMAT)
    except ObjectMissingError:
        return RetentionLedger()
