"""Local directories of committed policies and resume points: in place where the store is local, else a checked copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from storage.checkpoints import Checkpoint
from storage.errors import CorruptObjectError
from storage.manifest import sha256_of_file
from storage.policies import Policy, fetch_policy, local_policy_folder, resolve_policy
from storage.store import Store

if TYPE_CHECKING:
    from stages.context import StageContext


def policy_directory(context: StageContext, policy: Policy) -> Path:
    """Return a local directory with a policy's files, in Hugging Face format."""
    store = _store_of(context, policy)
    local = local_policy_folder(store, policy)
    if local is not None and local.is_dir():
        return local
    folder = _cache(context) / "policies" / f"{policy.version}-{policy.weights_hash[:16]}"
    with context.phase("fetch_policy"):
        return fetch_policy(store, policy, folder)


def checkpoint_directory(context: StageContext, checkpoint: Checkpoint) -> Path:
    """Return a local directory with a resume point's files.

    Raises:
        CorruptObjectError: a file differs from its manifest.
    """
    manifest = checkpoint.manifest
    base = manifest.key.rpartition("/")[0]
    local = context.home.local_path(f"{base}/{manifest.attempt}")
    if local is not None and local.is_dir():
        return local
    folder = _cache(context) / "trainer" / f"{checkpoint.version}-{manifest.content_digest[:16]}"
    with context.phase("fetch_checkpoint"):
        for part in manifest.parts:
            target = folder / part.name
            if target.is_file() and sha256_of_file(target) == (part.size, part.sha256):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            context.home.download(part.path, target)
            if sha256_of_file(target) != (part.size, part.sha256):
                raise CorruptObjectError(
                    f"{context.home.url}/{part.path} differs from its manifest; run `motley verify`", key=part.path
                )
    return folder


def policy_at_home(context: StageContext, version: int) -> Policy:
    """Return a committed policy version of the home region."""
    return resolve_policy(context.home, context.run.name, version)


def files_of(directory: Path) -> dict[str, Path]:
    """Return all files below a directory by relative name, sorted."""
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}


def _store_of(context: StageContext, policy: Policy) -> Store:
    """Return the nearest store that holds the policy: the region's own, else the home region's."""
    return context.store if context.store.exists(policy.manifest.key) else context.home


def _cache(context: StageContext) -> Path:
    return context.state_dir / "cache" / context.run.name
