"""Retention: which policy versions and resume points go, and how they go without hurting a reader.

Kept are the newest complete versions, every K-th, the head, what the staleness bound may still ask for, and what a
live lease names. A version is only dropped while a newer complete one exists (C6). Deletion takes two passes: the
first one retires a version in the ledger, a later one, at least the grace period after, deletes it if still no
lease names it (see ``storage.leases`` for why that is safe).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from storage.checkpoints import read_index, set_index
from storage.documents import model_bytes
from storage.errors import CorruptObjectError, InvalidInputError, InvalidNameError, ObjectMissingError
from storage.layout import (
    Kind,
    checkpoint_folder,
    critic_folder,
    manifest_key,
    parse_key,
    policy_folder,
    retention_ledger,
    run_folder,
)
from storage.leases import RetentionLedger, leased_folders, live_leases, read_ledger
from storage.manifest import find_valid, load_manifest
from storage.policies import head_version
from storage.policy_copies import bases_needed
from storage.posix_store import TEMPORARY_PREFIX
from storage.store import Store
from storage.superseded import superseded_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRule:
    """What to keep."""

    keep_newest: int = 2
    """Newest complete versions kept (>= 1)."""
    keep_every: int | None = None
    """Also keep versions divisible by this (>= 1); ``None`` = no such rule."""
    keep_always: tuple[int, ...] = (0,)
    """Versions never dropped; version 0 is the initial policy, which the reference log-probs are of."""
    max_staleness: int = 0
    """Policy versions that a rollout may lag: versions >= head - max_staleness - 1 are kept (>= 0)."""
    grace_s: float = 3600.0
    """Seconds between retiring and deleting; longer than any reader takes from lease to look-up (>= 0)."""

    def __post_init__(self) -> None:
        """Refuse a rule that would keep nothing."""
        every = 1 if self.keep_every is None else self.keep_every
        if self.keep_newest < 1 or every < 1 or self.max_staleness < 0 or self.grace_s < 0:
            message = f"retention rule {self} is refused: keep_newest, keep_every >= 1; max_staleness, grace_s >= 0"
            raise InvalidInputError(message)


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What a pass did; every entry is an artefact folder or an object key."""

    retired: list[str] = field(default_factory=list)
    """Newly marked for deletion."""
    deleted: list[str] = field(default_factory=list)
    """Deleted in this pass."""
    spared: list[str] = field(default_factory=list)
    """Marked before, but leased or needed again: no longer marked."""


def kept_versions(versions: Collection[int], rule: RetentionRule, *, head: int | None) -> set[int]:
    """Return which complete versions a rule keeps, leases apart.

    Args:
        versions: Complete versions.
        rule: The rule.
        head: Authoritative policy version, ``None`` before the first.
    """
    newest = set(sorted(versions)[-rule.keep_newest :])
    lowest_needed = None if head is None else head - rule.max_staleness - 1
    return {
        version
        for version in versions
        if version in newest
        or version in rule.keep_always
        or (rule.keep_every is not None and version % rule.keep_every == 0)
        or (lowest_needed is not None and version >= lowest_needed)
    }


def apply_retention(store: Store, run: str, rule: RetentionRule, now: datetime) -> RetentionReport:
    """Run one pass over policies, resume points and critics.

    Args:
        store: Where.
        run: Run name.
        rule: What to keep.
        now: Current time, UTC, injected.

    Raises:
        CorruptObjectError: A lease, the ledger or the head cannot be read; nothing is deleted then.
    """
    report = RetentionReport()
    ledger = dict(read_ledger(store, run).retired)
    protected = _protected(store, run, now)
    unneeded = _unneeded(store, run, rule)
    due = now - timedelta(seconds=rule.grace_s)
    for folder in sorted(ledger):
        if folder not in unneeded or folder in protected:
            del ledger[folder]
            report.spared.append(folder)
    deletable = [folder for folder in sorted(ledger) if ledger[folder] <= due]
    for folder in sorted(unneeded - ledger.keys() - protected - set(report.spared)):
        ledger[folder] = now
        report.retired.append(folder)
    _write_ledger(store, run, ledger)
    for folder in deletable:
        _delete_artefact(store, run, folder)
        del ledger[folder]
        report.deleted.append(folder)
    _write_ledger(store, run, ledger)
    return report


def collect_orphans(store: Store, run: str, *, now: datetime, grace_s: float = 86400.0) -> list[str]:
    """Delete data objects of attempts that never committed, and abandoned temporary files.

    An object of an attempt that may still commit must not go, so ``grace_s`` must exceed the longest stage. Objects
    below a manifest that cannot be read stay: ``motley verify`` reports them.

    Args:
        store: Where.
        run: Run name.
        now: Current time, UTC, injected; compared with the store's clock.
        grace_s: Least age of what is deleted, seconds.

    Returns:
        Keys that were deleted.
    """
    due = now - timedelta(seconds=grace_s)
    parts_by_folder: dict[str, set[str] | None] = {}
    superseded = superseded_parts(store, run)
    deleted = []
    for info in list(store.list(run_folder(run))):
        if info.modified is None or info.modified > due:
            continue
        is_orphan = info.key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
        folder = None if is_orphan else artefact_folder(info.key)
        if folder is not None:
            if folder not in parts_by_folder:
                parts_by_folder[folder] = _part_paths(store, folder)
            paths = parts_by_folder[folder]
            is_orphan = paths is not None and info.key not in paths and info.key not in superseded
        if is_orphan and store.delete(info.key):
            deleted.append(info.key)
    return deleted


def artefact_folder(key: str) -> str | None:
    """Return the artefact folder of a data object's key, ``None`` for any other key."""
    try:
        parsed = parse_key(key)
    except InvalidNameError:
        return None
    if parsed.attempt is None or parsed.name is None:
        return None
    return key.removesuffix(f"/{parsed.attempt}/{parsed.name}")


def _part_paths(store: Store, folder: str) -> set[str] | None:
    """Return the paths that a manifest names; empty if there is none, ``None`` if it cannot be read."""
    try:
        return {part.path for part in load_manifest(store, folder).parts}
    except ObjectMissingError:
        return set()
    except CorruptObjectError:
        return None


def _protected(store: Store, run: str, now: datetime) -> set[str]:
    return {folder for held in live_leases(store, run, now) for folder in leased_folders(held)}


def _unneeded(store: Store, run: str, rule: RetentionRule) -> set[str]:
    """Return the folders of committed versions that the rule does not keep and a newer complete one follows."""
    head = head_version(store, run)
    folders = {Kind.POLICY: policy_folder, Kind.CHECKPOINT: checkpoint_folder, Kind.CRITIC: critic_folder}
    committed: dict[Kind, set[int]] = {kind: set() for kind in folders}
    for info in store.list(run_folder(run)):
        try:
            parsed = parse_key(info.key)
        except InvalidNameError:
            continue
        if parsed.kind in folders and not parsed.is_data and parsed.number is not None:
            committed[parsed.kind].add(parsed.number)
    unneeded = set()
    for kind, folder_of in folders.items():
        complete = {v for v in committed[kind] if find_valid(store, folder_of(run, v)) is not None}
        keep = kept_versions(complete, rule, head=head)
        if kind is Kind.POLICY:
            keep |= bases_needed(store, run, keep)
        newest = max(complete, default=-1)
        unneeded |= {folder_of(run, v) for v in committed[kind] - keep if v < newest}
    return unneeded


def _delete_artefact(store: Store, run: str, folder: str) -> None:
    """Delete index entry, then manifest, then data objects, so no reader ever finds a manifest without parts."""
    parsed = parse_key(manifest_key(folder))
    if parsed.kind is Kind.CHECKPOINT and parsed.number is not None:
        set_index(store, run, set(read_index(store, run)) - {parsed.number})
    store.delete(manifest_key(folder))
    kept = superseded_parts(store, run)
    for info in list(store.list(folder)):
        if info.key not in kept:
            store.delete(info.key)


def _write_ledger(store: Store, run: str, retired: dict[str, datetime]) -> None:
    ledger = RetentionLedger(retired=retired)
    if ledger != read_ledger(store, run):
        store.publish(retention_ledger(run), model_bytes(ledger, retention_ledger(run)))
