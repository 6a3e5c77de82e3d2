"""Copies of committed artefacts in another store: explicit, resumable, proved part by part.

A copy has the original's inputs, content digest and metadata, so a reader cannot tell where it was made; who copied it
stands in ``created_by``. What is there already and valid is left alone; parts cut on the way go on where they stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import Split, shard_folder
from storage.manifest import Manifest, PartSource, commit, find_valid, load_manifest
from storage.rollout_schema import Family
from storage.store import Store
from storage.transfer import Link, fetch_part

_MOST_PROBED = 64
"""Shards looked for in a region before its next family: the first one made there may not be shard 0."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """What a replication did."""

    manifests: tuple[Manifest, ...]
    """Manifests that stand in the target, in the order asked for."""
    num_copied: int
    """Artefacts among them that were copied now; the others were there."""
    num_bytes: int
    """Bytes read from the source."""


def replicate_artefact(
    source: Store,
    target: Store,
    folder: str,
    work: Path,
    *,
    created_by: str,
    attempt: str | None = None,
    link: Link | None = None,
) -> tuple[Manifest, int]:
    """Copy one committed artefact into another store, or find that it is there.

    Args:
        source: Where it is committed.
        target: Where the copy goes.
        folder: Artefact folder, the same in both.
        work: Local folder for parts on their way; kept on failure, so that the next call goes on.
        created_by: Who copies.
        attempt: Token of this attempt.
        link: How the link to the source is used.

    Returns:
        The manifest that stands in the target, and the bytes read.

    Raises:
        ObjectMissingError: It is not committed at the source, or a part is gone.
        CorruptObjectError: A part differs from its manifest; nothing becomes visible in the target.
        AlreadyPublishedError: Other content is committed in the target for the same inputs.
    """
    manifest = load_manifest(source, folder)
    standing = find_valid(target, folder, input_fingerprint=manifest.input_fingerprint)
    if standing is not None and standing.content_digest == manifest.content_digest:
        return standing, 0
    read, sources = 0, {}
    for part in manifest.parts:
        local = work / part.sha256
        if not local.is_file():  # complete files appear only after their comparison
            read += fetch_part(source, part, local, link)
        sources[part.name] = PartSource(local, part.rows, known=(part.size, part.sha256))
    copy = commit(
        target,
        folder,
        sources,
        kind=manifest.kind,
        input_fingerprint=manifest.input_fingerprint,
        created_by=created_by,
        schema_version=manifest.schema_version,
        policy_versions=manifest.policy_versions,
        metadata=manifest.metadata,
        content_digest=manifest.content_digest,
        attempt=attempt,
    )
    for part in manifest.parts:
        (work / part.sha256).unlink(missing_ok=True)
    return copy, read


def replicate_iteration(
    sources: Sequence[Store],
    target: Store,
    run: str,
    iteration: int,
    work: Path,
    *,
    created_by: str,
    families: Sequence[Family] = tuple(Family),
    split: Split = Split.TRAIN,
    attempt: str | None = None,
    link: Link | None = None,
) -> Replicated:
    """Copy every shard of an iteration's families into one store, wherever each one was made.

    Args:
        sources: Stores of the other regions; of each shard the first complete one is taken.
        target: Where the copies go.
        run: Run name.
        iteration: RL iteration (split eval: policy version evaluated).
        work: Local folder for parts on their way.
        created_by: Who copies.
        families: Families to copy; one that no region has is left out.
        split: Train or eval.
        attempt: Token of this attempt.
        link: How the links are used.

    Raises:
        ObjectMissingError: A shard that belongs to a family is in no region.
    """
    done: list[Manifest] = []
    copied, read = 0, 0
    for family in families:
        for folder in _shard_folders([target, *sources], run, iteration, family, split):
            source = next((store for store in sources if find_valid(store, folder) is not None), None)
            if source is None and find_valid(target, folder) is not None:
                done.append(load_manifest(target, folder))
                continue
            if source is None:
                regions = ", ".join(store.url for store in sources)
                message = f"{folder} is complete in none of {regions}; repeat the stage that writes it"
                raise ObjectMissingError(message, key=folder)
            manifest, size = replicate_artefact(
                source, target, folder, work, created_by=created_by, attempt=attempt, link=link
            )
            done.append(manifest)
            copied, read = copied + bool(size), read + size
    return Replicated(tuple(done), copied, read)


def _shard_folders(stores: Sequence[Store], run: str, iteration: int, family: Family, split: Split) -> list[str]:
    """Return the folders of all shards of a family, by what any committed shard says of their number."""
    for store in stores:
        for shard in range(_MOST_PROBED):
            try:
                manifest = load_manifest(store, shard_folder(run, iteration, family.value, shard, split))
            except (ObjectMissingError, CorruptObjectError):
                continue
            count = int(manifest.metadata.get("num_shards", 0))
            return [shard_folder(run, iteration, family.value, index, split) for index in range(count)]
    return []
