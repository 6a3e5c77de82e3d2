"""Retention: which policy versions and resume points go, at once and without hurting a reader.

Kept are the newest complete versions, every K-th, what the staleness bound may still ask for, what the evaluation and
report of an unfinished iteration still read, and what a live lease names. A version is only dropped while a newer
complete one exists (C6). A pass marks a version as retired, then looks for leases, then deletes it (see
``storage.leases`` for why that order is safe); a pass that dies is taken up by the next one.

What attempts left that died before their manifest is collected here too (:func:`collect_orphans`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from storage.checkpoints import read_index, set_index
from storage.documents import model_bytes
from storage.errors import CorruptObjectError, InvalidInputError, InvalidNameError, ObjectMissingError
from storage.layout import (
    MANIFEST_NAME,
    checkpoint_folder,
    checkpoints_folder,
    critic_folder,
    critics_folder,
    iteration_record,
    manifest_key,
    policies_folder,
    policy_folder,
    retention_ledger,
    run_folder,
)
from storage.leases import RetentionLedger, leased_folders, live_leases, read_ledger
from storage.manifest import find_valid, load_manifest
from storage.parsed_keys import Kind, parse_key
from storage.policies import head_version
from storage.policy_copies import bases_needed
from storage.posix_store import TEMPORARY_PREFIX
from storage.store import ObjectInfo, Store
from storage.superseded import superseded_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRule:
    """What to keep."""

    keep_newest: int = 2
    """Newest complete policy versions kept (>= 1)."""
    keep_checkpoints: int = 2
    """Newest complete resume points, and critics, kept up to the head (>= 1); those beyond it are kept too."""
    keep_every: int | None = None
    """Also keep versions divisible by this, with their resume points, to rewind to (>= 1); ``None`` = no such rule."""
    keep_always: tuple[int, ...] = (0,)
    """Policy and critic versions never dropped; the reference log-probs are of policy 0, and version 0 of both gives
    engines their architecture."""
    max_staleness: int = 0
    """Policy versions that a rollout may lag: versions >= head - max_staleness - 1 are kept (>= 0)."""

    def __post_init__(self) -> None:
        """Refuse a rule that would keep nothing."""
        every = 1 if self.keep_every is None else self.keep_every
        if min(self.keep_newest, self.keep_checkpoints, every) < 1 or self.max_staleness < 0:
            message = (
                f"retention rule {self} is refused: keep_newest, keep_checkpoints, keep_every >= 1; max_staleness >= 0"
            )
            raise InvalidInputError(message)


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What a pass did; every entry is an artefact folder."""

    deleted: list[str] = field(default_factory=list)
    """Deleted in this pass."""
    spared: list[str] = field(default_factory=list)
    """Not kept by the rule, but in use by the holder of a lease."""


def kept_versions(versions: Collection[int], rule: RetentionRule, *, head: int | None) -> set[int]:
    """Return which complete policy versions a rule keeps, leases and unfinished iterations apart.

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


def apply_retention(
    store: Store, run: str, rule: RetentionRule, now: datetime, *, copies: Sequence[Store] = ()
) -> RetentionReport:
    """Run one pass over policies, resume points and critics; one pass of a run at a time.

    Args:
        store: Store of the home region: it has the head, the leases and the ledger.
        run: Run name.
        rule: What to keep.
        now: Current time, UTC, injected.
        copies: Stores of other regions, which hold copies of policy versions; what goes at home goes there too.

    Raises:
        CorruptObjectError: A lease, the ledger or the head cannot be read; nothing is deleted then.
    """
    stores = (*copies, store)
    unneeded = _unneeded(stores, run, rule)
    spared = unneeded & _leased(store, run, now)
    doomed = unneeded - spared
    _write_ledger(store, run, dict.fromkeys(sorted(doomed), now))
    late = doomed & _leased(store, run, now)  # a reader that came before it could see the mark
    for place in stores:
        for folder in sorted(doomed - late - _bases(place, run, doomed - late)):
            _delete_artefact(place, run, folder)
    _write_ledger(store, run, {})
    return RetentionReport(deleted=sorted(doomed - late), spared=sorted(spared | late))


def collect_orphans(
    store: Store,
    run: str,
    *,
    now: datetime,
    leases_at: Store | None = None,
    folders: Collection[str] | None = None,
    grace_s: float = 600.0,
) -> list[str]:
    """Delete data objects that no manifest names and nobody uses, and abandoned temporary files.

    Such an object is of an attempt that died, or whose manifest a later one replaced. It stays while a lease names its
    attempt, or its iteration, and until ``grace_s`` after it was replaced: people read without a lease. Objects below
    a manifest that cannot be read stay: ``motley verify`` reports them.

    Args:
        store: Where.
        run: Run name.
        now: Current time, UTC, injected; compared with the store's clock.
        leases_at: Store with the run's leases, the home region's; default ``store``.
        folders: Folders to look through; default all of the run.
        grace_s: Least time since an object was written and replaced, seconds.

    Returns:
        Keys that were deleted.
    """
    due = now - timedelta(seconds=grace_s)
    found: dict[str, list[ObjectInfo]] = {}
    deleted = []
    for info in [info for base in folders or [run_folder(run)] for info in store.list(base)]:
        origin = _origin(info.key)
        if origin is not None:
            found.setdefault(origin.folder, []).append(info)
        elif _is_temporary(info.key) and _is_due(info, (), due) and store.delete(info.key):
            deleted.append(info.key)
    # Leases before manifests: an attempt that has given its lease back has committed before.
    leases = live_leases(leases_at or store, run, now)
    attempts = {attempt for held in leases for attempt in held.attempts}
    iterations = {iteration for held in leases for iteration in held.iterations}
    set_aside = superseded_parts(store, run)
    for folder, infos in found.items():
        named = None if _iteration_of(folder) in iterations else _part_paths(store, folder)
        for info in infos if named is not None else ():
            is_used = info.key in (named or ()) or info.key in set_aside or _attempt_of(info.key) in attempts
            if not is_used and _is_due(info, infos, due) and store.delete(info.key):
                deleted.append(info.key)
    return deleted


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a data object, or a temporary file that was to become one, belongs."""

    folder: str
    attempt: str


def _origin(key: str) -> _Origin | None:
    """Return the artefact and the attempt of a data object, ``None`` for any other key."""
    final = f"{key.rpartition('/')[0]}/unfinished" if _is_temporary(key) else key
    try:
        parsed = parse_key(final)
    except InvalidNameError:
        return None
    if parsed.attempt is None or parsed.name is None:
        return None
    return _Origin(final.removesuffix(f"/{parsed.attempt}/{parsed.name}"), parsed.attempt)


def _attempt_of(key: str) -> str | None:
    origin = _origin(key)
    return None if origin is None else origin.attempt


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def _iteration_of(folder: str) -> int | None:
    """Return the iteration (or evaluated version) of a shard's folder, ``None`` for other artefacts."""
    parsed = parse_key(manifest_key(folder))
    return parsed.number if parsed.kind is Kind.SHARD else None


def _is_due(info: ObjectInfo, others: Collection[ObjectInfo], due: datetime) -> bool:
    """Whether an object is old enough, and so is what replaced it."""
    if info.modified is None:
        return False
    attempt = _attempt_of(info.key)
    later = [
        other.modified
        for other in others
        if other.modified is not None and other.modified > info.modified and _attempt_of(other.key) != attempt
    ]
    return min(later, default=info.modified) <= due


def _part_paths(store: Store, folder: str) -> set[str] | None:
    """Return the paths that a manifest names; empty if there is none, ``None`` if it cannot be read."""
    try:
        return {part.path for part in load_manifest(store, folder).parts}
    except ObjectMissingError:
        return set()
    except CorruptObjectError:
        return None


def _leased(store: Store, run: str, now: datetime) -> set[str]:
    return {folder for held in live_leases(store, run, now) for folder in leased_folders(held)}


def _unneeded(stores: Sequence[Store], run: str, rule: RetentionRule) -> set[str]:
    """Return the folders of committed versions that nothing but a lease keeps and a newer complete one follows.

    The last store is the home region's: what is complete there decides. A version that seems broken now may have been
    read badly: it stays as long as the rule would keep it, beside as many that are whole.
    """
    home = stores[-1]
    head = head_version(home, run)
    policies = _committed(stores, policies_folder(run))
    unreported = _unreported(home, run, policies)
    complete = {v for v in policies if find_valid(home, policy_folder(run, v)) is not None}
    keep = unreported.union(*(kept_versions(versions, rule, head=head) for versions in (complete, policies)))
    unneeded = {policy_folder(run, v) for v in policies - keep if v < max(complete, default=-1)}
    critics = {*unreported, *rule.keep_always}
    resumable = ((checkpoints_folder, checkpoint_folder, set[int]()), (critics_folder, critic_folder, critics))
    for base_of, folder_of, keep in resumable:
        points = _committed([home], base_of(run))
        complete = {v for v in points if find_valid(home, folder_of(run, v)) is not None}
        kept = keep.union(*(_kept_points(versions, rule, head) for versions in (complete, points)))
        unneeded |= {folder_of(run, v) for v in points - kept if v < max(complete, default=-1)}
    return unneeded


def _bases(store: Store, run: str, doomed: Collection[str]) -> set[str]:
    """Return the folders of versions in a store from which its copies of versions that stay are made."""
    staying = [v for v in _committed([store], policies_folder(run)) if policy_folder(run, v) not in doomed]
    return {policy_folder(run, v) for v in bases_needed(store, run, staying)}


def _kept_points(complete: Collection[int], rule: RetentionRule, head: int | None) -> set[int]:
    """Return the newest resume points up to the head, every K-th, and all beyond the head: those may yet go."""
    in_force = sorted(v for v in complete if head is None or v <= head)
    every = {v for v in complete if rule.keep_every is not None and v % rule.keep_every == 0}
    return {*in_force[-rule.keep_checkpoints :], *every, *(v for v in complete if head is not None and v > head)}


def _committed(stores: Iterable[Store], base: str) -> set[int]:
    """Return the numbers of the artefacts below a folder that have a manifest in any of the stores."""
    keys = (info.key for store in stores for info in store.list(base))
    found = (re.fullmatch(rf"([0-9]+)/{re.escape(MANIFEST_NAME)}", key.removeprefix(f"{base}/")) for key in keys)
    return {int(match[1]) for match in found if match}


def _unreported(store: Store, run: str, versions: Collection[int]) -> set[int]:
    """Return the versions whose iteration has no record: its evaluation and report still read them."""
    return {v for v in versions if v > 0 and not store.exists(iteration_record(run, v - 1))}


def _delete_artefact(store: Store, run: str, folder: str) -> None:
    """Delete index entry, then manifest, then data objects, so no reader ever finds a manifest without parts.

    Only what the manifest names goes; what other attempts left there is for :func:`collect_orphans`.
    """
    parsed = parse_key(manifest_key(folder))
    if parsed.kind is Kind.CHECKPOINT and parsed.number is not None:
        set_index(store, run, set(read_index(store, run)) - {parsed.number})
    paths = _part_paths(store, folder) or set()
    store.delete(manifest_key(folder))
    for path in sorted(paths - superseded_parts(store, run)):
        store.delete(path)


def _write_ledger(store: Store, run: str, retired: dict[str, datetime]) -> None:
    ledger = RetentionLedger(retired=retired)
    if ledger != read_ledger(store, run):
        store.publish(retention_ledger(run), model_bytes(ledger, retention_ledger(run)))
