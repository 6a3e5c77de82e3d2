"""Resume points of the trainer: model, optimiser, RNG of every rank and data position in one commit.

A resume point is complete when its manifest is there with all its parts; torn ones are skipped and reported, never
loaded. Resuming under another configuration or data set is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from storage.documents import fingerprint, model_bytes, read_model
from storage.errors import (
    CorruptObjectError,
    InvalidInputError,
    ObjectMissingError,
    ResumeMismatchError,
)
from storage.layout import checkpoint_folder, checkpoint_index, checkpoints_folder
from storage.manifest import Manifest, PartSource, commit, load_manifest, part_faults, read_part
from storage.policies import num_rollbacks, read_head
from storage.store import Store

CHECKPOINT_KIND = "checkpoint"
INDEX_FORMAT = "motley.checkpoint_index/1"

_log = logging.getLogger(__name__)


class CheckpointIndex(BaseModel):
    """The document ``trainer/index.json``: committed versions, so that readers need no listing."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.checkpoint_index/1"] = "motley.checkpoint_index/1"
    """Kind and version of this document."""
    versions: tuple[int, ...] = ()
    """Committed and not yet retired versions, ascending."""


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A resume point that was newer than the one loaded but not usable."""

    version: int
    """Its version."""
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete resume point."""

    run: str
    """Run name."""
    version: int
    """Policy version that training continues from."""
    config_hash: str
    """SHA-256 of the settings that training must share to continue (model shape, optimiser, parallelism)."""
    dataset_fingerprint: str
    """SHA-256 of the data set."""
    data_position: Mapping[str, Any]
    """Where in the data set training stands (epoch, index, order seed ...)."""
    rng_files: tuple[str, ...]
    """Name of the file with the generators' states of each rank, in rank order."""
    manifest: Manifest
    """Its manifest."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer resume points that were not usable, newest first."""


def save_checkpoint(
    store: Store,
    run: str,
    version: int,
    files: Mapping[str, bytes | Path],
    *,
    config_hash: str,
    dataset_fingerprint: str,
    data_position: Mapping[str, Any],
    rng_files: Sequence[str],
    created_by: str,
    metadata: Mapping[str, Any] | None = None,
    attempt: str | None = None,
) -> Manifest:
    """Commit a resume point; the same content again is success.

    Args:
        store: Where to.
        run: Run name.
        version: Policy version that training continues from.
        files: Content (bytes or local path) by file name: optimiser shards, RNG states, anything else.
        config_hash: SHA-256 of the settings that must be the same at resume.
        dataset_fingerprint: SHA-256 of the data set.
        data_position: JSON-able position in the data set.
        rng_files: Names among ``files``, one per rank in rank order.
        created_by: Who commits.
        metadata: JSON-able extras.
        attempt: Token of this attempt; default a fresh one.

    Raises:
        InvalidInputError: No RNG file, or one that is not among the files.
        AlreadyPublishedError: The version is committed with other content.
    """
    absent = [name for name in rng_files if name not in files]
    if absent or not rng_files:
        message = (
            f"checkpoint {version} of run {run}: RNG files {absent or 'none'} given, but one file per rank is needed "
            "and each must be among the files"
        )
        raise InvalidInputError(message)
    folder = checkpoint_folder(run, version)
    rollbacks = num_rollbacks(read_head(store, run), version)
    manifest = commit(
        store,
        folder,
        {name: PartSource(data) for name, data in files.items()},
        kind=CHECKPOINT_KIND,
        input_fingerprint=fingerprint(CHECKPOINT_KIND, run, version, config_hash, dataset_fingerprint, rollbacks),
        created_by=created_by,
        policy_versions=(version,),
        metadata={
            **(metadata or {}),
            "config_hash": config_hash,
            "dataset_fingerprint": dataset_fingerprint,
            "data_position": dict(data_position),
            "rng_files": list(rng_files),
        },
        attempt=attempt,
    )
    set_index(store, run, {*read_index(store, run), version})
    return manifest


def load_checkpoint(
    store: Store,
    run: str,
    version: int | None = None,
    *,
    config_hash: str | None = None,
    dataset_fingerprint: str | None = None,
) -> Checkpoint:
    """Return the newest complete resume point, or exactly the version asked for.

    Args:
        store: Where from.
        run: Run name.
        version: Exact version (give it after a rollback of the policy); default the newest complete one.
        config_hash: If given, must be the resume point's.
        dataset_fingerprint: If given, must be the resume point's.

    Raises:
        ObjectMissingError: There is none (a fresh start must be the caller's explicit decision).
        CorruptObjectError: The exact version is torn, or resume points exist but none is complete.
        ResumeMismatchError: It belongs to another configuration or data set.
    """
    versions = [version] if version is not None else known_versions(store, run)
    skipped: list[SkippedCheckpoint] = []
    for candidate in versions:
        try:
            found = _complete(store, run, candidate, tuple(skipped))
        except (CorruptObjectError, ObjectMissingError) as error:
            if version is not None:
                raise
            skipped.append(SkippedCheckpoint(candidate, str(error)))
            _log.warning("run %s: resume point %s is skipped: %s", run, candidate, error)
            continue
        _check_match(found, config_hash, dataset_fingerprint)
        return found
    folder = checkpoints_folder(run)
    if skipped:
        reasons = "; ".join(f"{entry.version}: {entry.reason}" for entry in skipped)
        message = f"{store.url}/{folder}: none of {len(skipped)} resume points is complete ({reasons})"
        raise CorruptObjectError(message, key=folder)
    message = f"{store.url}/{folder}: run {run} has no resume point; start from its initial policy explicitly"
    raise ObjectMissingError(message, key=folder)


def read_checkpoint_file(store: Store, checkpoint: Checkpoint, name: str) -> bytes:
    """Return one file of a resume point after comparing its hash.

    Raises:
        ObjectMissingError: No such file.
        CorruptObjectError: Its bytes differ from the manifest.
    """
    return read_part(store, checkpoint.manifest.part(name))


def read_index(store: Store, run: str) -> tuple[int, ...]:
    """Return the committed versions that the index names, ascending; empty if there is no index."""
    try:
        return read_model(store, checkpoint_index(run), CheckpointIndex, INDEX_FORMAT).versions
    except ObjectMissingError:
        return ()


def set_index(store: Store, run: str, versions: set[int]) -> None:
    """Replace the index if it changes (its one writer is the serial training stage)."""
    wanted = tuple(sorted(versions))
    if wanted != read_index(store, run):
        store.publish(checkpoint_index(run), model_bytes(CheckpointIndex(versions=wanted), checkpoint_index(run)))


def known_versions(store: Store, run: str) -> list[int]:
    """Return all versions that have objects, newest first.

    The index is the authority; the listing only adds what a writer left before it died.
    """
    base = f"{checkpoints_folder(run)}/"
    found = (re.match(r"([0-9]+)/", info.key.removeprefix(base)) for info in store.list(checkpoints_folder(run)))
    return sorted({*read_index(store, run), *(int(match[1]) for match in found if match)}, reverse=True)


def _complete(store: Store, run: str, version: int, skipped: tuple[SkippedCheckpoint, ...]) -> Checkpoint:
    folder = checkpoint_folder(run, version)
    manifest = load_manifest(store, folder)
    faults = part_faults(store, manifest)
    if faults or manifest.kind != CHECKPOINT_KIND:
        message = f"{store.url}/{folder} is torn: {'; '.join(faults) or f'kind is {manifest.kind}'}"
        raise CorruptObjectError(message, key=folder)
    fields = manifest.metadata
    try:
        return Checkpoint(
            run=run,
            version=version,
            config_hash=fields["config_hash"],
            dataset_fingerprint=fields["dataset_fingerprint"],
            data_position=fields["data_position"],
            rng_files=tuple(fields["rng_files"]),
            manifest=manifest,
            skipped=skipped,
        )
    except KeyError as error:
        message = f"{store.url}/{manifest.key}: field metadata/{error.args[0]} is missing"
        raise CorruptObjectError(message, key=manifest.key) from error


def _check_match(found: Checkpoint, config_hash: str | None, dataset_fingerprint: str | None) -> None:
    faults = [
        f"{what} is {has[:12]}, this run's is {wanted[:12]}"
        for what, has, wanted in (
            ("configuration hash", found.config_hash, config_hash),
            ("dataset fingerprint", found.dataset_fingerprint, dataset_fingerprint),
        )
        if wanted is not None and has != wanted
    ]
    if faults:
        message = (
            f"resume point {found.version} of run {found.run} does not fit: {'; '.join(faults)}; resume with the "
            "settings and data that it was made with, or start a new run"
        )
        raise ResumeMismatchError(message, key=found.manifest.key)
