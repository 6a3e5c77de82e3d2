"""Local directories of committed policies and resume points: in place where the store is local, else a checked copy."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.engines.protocol import AdapterBase
from stages.fan_out import fan_out_turn
from storage.adapter_policies import base_of, prove_adapter
from storage.checkpoints import Checkpoint
from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import checkpoint_folder, manifest_key
from storage.manifest import sha256_of_file
from storage.policies import LocalPolicy, Policy, resolve_policy
from storage.policy_fetch import FetchedPolicy, Proved, fetch_policy, local_policy_folder
from storage.store import Store
from storage.transfer import Link, download_part

if TYPE_CHECKING:
    from stages.context import StageContext


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """What engines load of a policy version, proved."""

    directory: Path
    """The version's files: a model in Hugging Face format, or a PEFT adapter."""
    base: AdapterBase | None
    """The whole weights below an adapter; None for a whole version."""


def policy_directory(context: StageContext, policy: Policy) -> Path:
    """Return a local directory with a policy's files, in Hugging Face format; they stay while the stage works.

    Raises:
        ObjectMissingError: retention has deleted the version, or is about to.
    """
    context.lease.hold(policies=[policy.version])
    for store in nearest_stores(context):
        if (local := _in_place(store, policy)) is not None:
            return local
    if _cached_folder(context, policy).is_dir():  # proved again, and nothing is read unless it is damaged
        return fetch_local(context, policy, nearest_stores(context)).local.folder
    with fan_out_turn(context, f"policy version {policy.version}"):
        return fetch_local(context, policy, nearest_stores(context)).local.folder


def loadable_policy(context: StageContext, policy: Policy) -> PolicyFolder:
    """Return what engines load of a version; of an adapter, base and adapter are proved before an engine is asked.

    Raises:
        ObjectMissingError: retention has deleted the version or its base, or is about to.
        CorruptObjectError: base or adapter is not what the version's manifest says.
    """
    if policy.adapter is None:
        return PolicyFolder(policy_directory(context, policy), None)
    base = base_of(context.home, policy)
    below = AdapterBase(directory=policy_directory(context, base), weights_hash=base.weights_hash)
    directory = policy_directory(context, policy)
    prove_adapter(LocalPolicy(policy, directory))
    return PolicyFolder(directory, below)


def fetch_local(
    context: StageContext,
    policy: Policy,
    stores: Sequence[Store],
    *,
    deltas: Path | None = None,
    proved: Proved | None = None,
) -> FetchedPolicy:
    """Bring a policy into this machine's cache, by deltas from a version that is here where that is possible.

    Args:
        context: The stage.
        policy: The version, as the home store has it.
        stores: Where from, nearest first.
        deltas: Folder in which the deltas that were read are left.
        proved: Told of each file of a version that is fetched whole, while the next one arrives.
    """
    context.lease.hold(policies=[policy.version])
    folder = _cached_folder(context, policy)
    with context.phase("fetch_policy"):
        bases = _cached_before(context, policy)
        ends_at = time.monotonic() + context.deadline.remaining_s(f"policy version {policy.version}")
        link = Link(ends_at=ends_at)
        fetched = fetch_policy(stores, policy, folder, bases, deltas=deltas, link=link, proved=proved)
    for doubt in fetched.doubts:
        context.log("policy not fetched this way", version=policy.version, doubt=doubt)
    _prune(context, policy.version)
    return fetched


def keep_local(context: StageContext, policy: Policy, directory: Path) -> None:
    """Move a version's files, as just published, into this machine's cache, for the delta of the next version."""
    folder = _cached_folder(context, policy)
    if context.home.local_path(policy.manifest.key) is not None or folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    directory.rename(folder)
    _prune(context, policy.version)


def local_policy(context: StageContext, version: int) -> LocalPolicy | None:
    """Return a version of the run whose files are on this machine already, None if there is none."""
    try:
        policy = policy_at_home(context, version)
    except (ObjectMissingError, CorruptObjectError):
        return None
    folder = _in_place(context.home, policy) or _cached_folder(context, policy)
    return LocalPolicy(policy, folder) if folder.is_dir() else None


def checkpoint_directory(context: StageContext, checkpoint: Checkpoint) -> Path:
    """Return a local directory with a resume point's files; they stay while the stage works.

    Raises:
        CorruptObjectError: a file differs from its manifest.
        ObjectMissingError: retention has deleted the resume point, or is about to.
    """
    context.lease.hold(checkpoints=[checkpoint.version])
    manifest = checkpoint.manifest
    base = manifest.key.rpartition("/")[0]
    local = context.home.local_path(f"{base}/{manifest.attempt}")
    if local is not None and local.is_dir():
        return local
    folder = _cache(context) / "trainer" / f"{checkpoint.version}-{manifest.content_digest[:16]}"
    left_s = context.deadline.remaining_s(f"resume point {checkpoint.version}")
    prune_copies(context, folder.parent, checkpoint_folder)
    with context.phase("fetch_checkpoint"):
        for part in manifest.parts:
            target = folder / part.name
            if target.is_file() and sha256_of_file(target) == (part.size, part.sha256):
                continue
            download_part(context.home, part, target, Link(ends_at=time.monotonic() + left_s))
    return folder


def policy_at_home(context: StageContext, version: int) -> Policy:
    """Return a committed policy version of the home region."""
    return resolve_policy(context.home, context.run.name, version)


def files_of(directory: Path) -> dict[str, Path]:
    """Return all files below a directory by relative name, sorted."""
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}


def nearest_stores(context: StageContext) -> list[Store]:
    """Return the stores that hold policies for this machine, nearest first."""
    return [context.store] if context.store is context.home else [context.store, context.home]


def _in_place(store: Store, policy: Policy) -> Path | None:
    """Return the folder of the same version in a store on this machine's file system."""
    try:
        own = resolve_policy(store, policy.run, policy.version)
    except (ObjectMissingError, CorruptObjectError):
        return None
    return local_policy_folder(store, own) if own.weights_hash == policy.weights_hash else None


def _cached_folder(context: StageContext, policy: Policy) -> Path:
    return _cache(context) / "policies" / f"{policy.version}-{policy.weights_hash[:16]}"


def _cached_before(context: StageContext, policy: Policy) -> list[LocalPolicy]:
    """Return the versions in the cache from which deltas may lead to a policy, newest first."""
    versions = {version for version, _ in _cached(context) if version < policy.version}
    found = (local_policy(context, version) for version in sorted(versions, reverse=True)[:2])
    return [local for local in found if local is not None]


def _cached(context: StageContext) -> list[tuple[int, Path]]:
    folders = (_cache(context) / "policies").glob("[0-9]*-*")
    return [(int(folder.name.partition("-")[0]), folder) for folder in folders]


def _prune(context: StageContext, newest: int) -> None:
    """Forget cached versions that nothing on this machine asks for any more; version 0 stays, engines start from it."""
    oldest = newest - context.job.max_staleness - 2
    for version, folder in _cached(context):
        if 0 < version < oldest:
            shutil.rmtree(folder, ignore_errors=True)


def prune_copies(context: StageContext, copies: Path, folder_of: Callable[[str, int], str]) -> None:
    """Remove copies of versions that retention has deleted: nobody can hold those any more."""
    for copy in copies.glob("[0-9]*-*"):
        version = int(copy.name.partition("-")[0])
        if not context.home.exists(manifest_key(folder_of(context.run.name, version))):
            shutil.rmtree(copy, ignore_errors=True)


def _cache(context: StageContext) -> Path:
    return context.state_dir / "cache" / context.run.name
