"""Copies of policy versions in the stores of other regions: whole at anchors, in between only the deltas.

A copy has the home version's metadata, inputs and content digest, so nobody can tell by its content where it lies. One
that holds a delta only says in its metadata which files come out (``Policy.files``).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from storage.adapter_policies import base_of
from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import data_key, manifest_key, policy_folder
from storage.manifest import Part, PartSource, commit, find_valid
from storage.policies import DELTA_PART, POLICY_KIND, LocalPolicy, Policy, resolve_policy
from storage.store import Store

MAX_CHAIN: Final = 64
"""Most deltas that are applied one after the other."""


def publish_copy(
    store: Store,
    local: LocalPolicy,
    home: Policy,
    *,
    delta: Path | None,
    base: Policy | None,
    created_by: str,
    attempt: str | None = None,
    sent: Collection[str] = (),
) -> Policy:
    """Commit a version that was proved on this machine in a region's store.

    Args:
        store: The region's store.
        local: The version's files here.
        home: The version as its home store has it.
        delta: Local file with the delta that the home version carries, to be kept beside the copy.
        base: Version of the region's store that the delta starts from: only the delta and the files that differ
            from its are written; ``None`` writes all files.
        created_by: Who copies.
        attempt: Token of this attempt.
        sent: Names of the files that :func:`send_file` has written there already for this attempt.

    Raises:
        AlreadyPublishedError: Other content is committed there for the same inputs.
    """
    folder = policy_folder(home.run, home.version)
    metadata = {name: value for name, value in home.manifest.metadata.items() if delta is not None or name != "delta"}
    written = home.files
    if delta is not None and base is not None:
        unchanged = {(part.name, part.sha256) for part in base.files}
        written = tuple(
            part
            for part in home.files
            if not part.name.endswith(".safetensors") and (part.name, part.sha256) not in unchanged
        )
        metadata["files"] = [part.model_dump(mode="json") for part in home.files]
    sources = {
        part.name: PartSource(local.folder / part.name, known=(part.size, part.sha256), is_sent=part.name in sent)
        for part in written
    }
    if delta is not None:
        sources[DELTA_PART] = PartSource(delta, is_derived=True)
    _make_room(store, folder, home)
    commit(
        store,
        folder,
        sources,
        kind=POLICY_KIND,
        input_fingerprint=home.manifest.input_fingerprint,
        created_by=created_by,
        policy_versions=(home.version,),
        metadata=metadata,
        content_digest=home.manifest.content_digest,
        attempt=attempt,
    )
    return resolve_policy(store, home.run, home.version)


def send_file(store: Store, home: Policy, part: Part, path: Path, attempt: str) -> None:
    """Write one file of a version to a region's store, where it is invisible until :func:`publish_copy` commits it.

    Args:
        store: The region's store.
        home: The version as its home store has it.
        part: The file, as the home version names it.
        path: Local file, its bytes proved.
        attempt: Token of the attempt that will commit.
    """
    store.publish_file(data_key(policy_folder(home.run, home.version), attempt, part.name), path)


def find_copy(store: Store, home: Policy) -> Policy | None:
    """Return a region's copy of a version if it is complete, of the same weights, and its chain of deltas is whole."""
    try:
        policy = resolve_policy(store, home.run, home.version)
        if policy.weights_hash != home.weights_hash or find_valid(store, policy_folder(home.run, home.version)) is None:
            return None
        bases_of(store, policy)
    except (ObjectMissingError, CorruptObjectError):
        return None
    return policy


def bases_of(store: Store, policy: Policy) -> list[int]:
    """Return the versions that a store's version is made from, newest first; none for a whole one.

    A copy that holds a delta only, and an adapter, need others of the same store.

    Raises:
        ObjectMissingError: One of them is gone.
        CorruptObjectError: One of them has other weights than delta or adapter start from, or adapters are stacked.
    """
    versions = []
    while policy.adapter is not None or not policy.is_whole:
        if policy.adapter is not None:
            policy = base_of(store, policy)
            versions.append(policy.version)
            continue
        link = policy.delta
        before = resolve_policy(store, policy.run, link.base_version) if link is not None else None
        if link is None or before is None or before.weights_hash != link.base_weights_hash:
            message = f"{store.url}/{policy.manifest.key}: version {policy.version} has no base with the right weights"
            raise CorruptObjectError(message, key=policy.manifest.key)
        versions.append(before.version)
        policy = before
    return versions


def bases_needed(store: Store, run: str, versions: Collection[int]) -> set[int]:
    """Return the versions that others are made from: retention keeps them as long as it keeps those."""
    needed: set[int] = set()
    for version in versions:
        try:
            needed.update(bases_of(store, resolve_policy(store, run, version)))
        except ObjectMissingError:
            continue  # nothing can be made from it any more
        except CorruptObjectError:
            # It may have been read badly; a run's adapters are all on version 0.
            needed.update({0, *range(max(0, version - MAX_CHAIN), version)})
    return needed


def _make_room(store: Store, folder: str, home: Policy) -> None:
    """Withdraw a copy that nobody can use (its base is gone), so that a better one can take its place."""
    if find_copy(store, home) is None:
        store.delete(manifest_key(folder))
