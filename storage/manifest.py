"""The commit protocol: a set of data objects exists when its manifest exists.

Writers put data objects under attempt-specific keys and then one manifest, so no two attempts ever write the same
data object and a half-written attempt stays invisible. Readers follow manifests, never listings.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from storage import fence
from storage.documents import fingerprint, model_bytes, read_model
from storage.errors import (
    AlreadyPublishedError,
    CorruptObjectError,
    InvalidInputError,
    ObjectMissingError,
    SchemaVersionError,
)
from storage.layout import check_attempt, data_key, manifest_key
from storage.names import check_name
from storage.ranged_reads import COPY_BYTES
from storage.store import Store

MANIFEST_FORMAT = "motley.manifest/1"


class Part(BaseModel):
    """One data object of an artefact."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    """File name inside the artefact, e.g. ``model.safetensors``."""
    path: str
    """Object key, relative to the store's root."""
    size: int = Field(ge=0)
    """Length in bytes."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the bytes, hex."""
    rows: int | None = Field(default=None, ge=0)
    """Rows of a Parquet object; ``None`` for other objects."""


class Manifest(BaseModel):
    """What one artefact consists of, from which inputs it was made, and by whom."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.manifest/1"] = "motley.manifest/1"
    """Kind and version of this document."""
    kind: str
    """What the artefact is: ``rollouts``, a column family, ``policy``, ``checkpoint``, ``metrics``."""
    key: str
    """Object key of the manifest itself."""
    attempt: str
    """Token of the attempt that wrote the data objects."""
    parts: tuple[Part, ...]
    """The data objects, in the order of their names."""
    schema_version: int = Field(ge=1)
    """Version of the data objects' own schema."""
    policy_versions: tuple[int, ...] = ()
    """Policy versions that the data comes from or is, ascending."""
    input_fingerprint: str
    """SHA-256 (hex) of everything that decides the content; see ``storage.documents.fingerprint``."""
    content_digest: str
    """SHA-256 (hex) of the content without provenance (times, machine); two attempts at one input share it."""
    created_by: str
    """Stage, machine or person that committed."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Anything else about the artefact, JSON-able."""

    @property
    def rows(self) -> int:
        """Rows over all parts."""
        return sum(part.rows or 0 for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes over all parts."""
        return sum(part.size for part in self.parts)

    def part(self, name: str) -> Part:
        """Return the part of that name.

        Raises:
            ObjectMissingError: The artefact has no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        message = f"{self.key} has no part {name!r}; it has {', '.join(part.name for part in self.parts)}"
        raise ObjectMissingError(message, key=self.key)


@dataclass(frozen=True, slots=True)
class PartSource:
    """Content of a data object to be committed."""

    data: bytes | Path
    """The bytes, or a local file that holds them (streamed, never wholly in memory)."""
    rows: int | None = None
    """Rows, for Parquet."""
    is_derived: bool = False
    """Whether it follows from other parts and the history (a delta): not part of the content digest."""
    known: tuple[int, str] | None = None
    """Length and SHA-256 (hex), where the caller has just computed them; the store's size is compared all the same."""
    is_sent: bool = False
    """Whether the caller has written it under this attempt's key already, while other parts were still to come."""


def new_attempt() -> str:
    """Return a token that no other attempt has; random on purpose, it never enters any content."""
    return f"a{uuid.uuid4().hex[:16]}"


def commit(
    store: Store,
    folder: str,
    sources: Mapping[str, PartSource],
    *,
    kind: str,
    input_fingerprint: str,
    created_by: str,
    schema_version: int = 1,
    policy_versions: Iterable[int] = (),
    metadata: Mapping[str, Any] | None = None,
    content_digest: str | None = None,
    attempt: str | None = None,
) -> Manifest:
    """Write data objects and then the manifest that makes them visible.

    If a valid manifest for the same inputs lies there already, nothing is written. A manifest that is torn, whose
    parts are missing, or that was made from other inputs is replaced.

    Args:
        store: Where to.
        folder: Artefact folder from ``storage.layout``.
        sources: Content by file name.
        kind: What the artefact is.
        input_fingerprint: SHA-256 (hex) of everything that decides the content.
        created_by: Who commits.
        schema_version: Version of the data objects' schema.
        policy_versions: Policy versions that the data comes from.
        metadata: JSON-able extras.
        content_digest: SHA-256 of the content without provenance; default: over names, sizes, hashes, rows of the
            parts that are not derived.
        attempt: Token of this attempt; default: a fresh one.

    Returns:
        The manifest that stands afterwards (an older attempt's, if that had committed the same content).

    Raises:
        AlreadyPublishedError: Other content is committed for the same inputs.
        InvalidInputError: No sources, or metadata that JSON cannot hold.
    """
    key = manifest_key(folder)
    token = check_attempt(attempt) if attempt is not None else new_attempt()
    if not sources:
        message = f"{key}: nothing to commit, an artefact has at least one data object"
        raise InvalidInputError(message, key=key)
    parts = tuple(_described(name, data_key(folder, token, name), sources[name]) for name in sorted(sources))
    manifest = Manifest(
        kind=check_name(kind, "kind"),
        key=key,
        attempt=token,
        parts=parts,
        schema_version=schema_version,
        policy_versions=tuple(sorted(set(policy_versions))),
        input_fingerprint=input_fingerprint,
        content_digest=content_digest or digest_of_parts(p for p in parts if not sources[p.name].is_derived),
        created_by=created_by,
        metadata=dict(metadata or {}),
    )
    encoded = model_bytes(manifest, key)
    standing = find_valid(store, folder, input_fingerprint=input_fingerprint)
    if standing is not None:
        return _agreed(store, standing, manifest)
    for part in parts:
        if not sources[part.name].is_sent:
            _write_part(store, part, sources[part.name])
    if faults := part_faults(store, manifest):
        message = f"{store.url}/{folder}: the store lost what was just written: {'; '.join(faults)}; repeat the stage"
        raise CorruptObjectError(message, key=folder)
    return _publish_manifest(store, manifest, encoded)


def _publish_manifest(store: Store, manifest: Manifest, encoded: bytes) -> Manifest:
    """Publish the manifest unless a concurrent attempt at the same inputs has done so."""
    folder = manifest.key.rpartition("/")[0]

    def standing() -> Manifest | None:
        return find_valid(store, folder, input_fingerprint=manifest.input_fingerprint)

    if not store.has_conditional_create:
        if fence.may_publish(store, folder, manifest.attempt, lambda: standing() is not None):
            store.publish(manifest.key, encoded)
            fence.leave(store, folder)
            return manifest
    elif store.create(manifest.key, encoded):
        return manifest
    if (first := standing()) is not None:
        return _agreed(store, first, manifest)
    store.publish(manifest.key, encoded)
    return manifest


def _agreed(store: Store, standing: Manifest, offered: Manifest) -> Manifest:
    if standing.content_digest == offered.content_digest:
        return standing
    message = (
        f"{store.url}/{offered.key}: attempt {standing.attempt} committed content {standing.content_digest[:12]} for "
        f"the inputs {offered.input_fingerprint[:12]}, attempt {offered.attempt} made {offered.content_digest[:12]}; "
        "the committed content stands: read it instead of publishing again"
    )
    raise AlreadyPublishedError(message, key=offered.key)


def load_manifest(store: Store, folder: str) -> Manifest:
    """Read the manifest of an artefact.

    Raises:
        ObjectMissingError: The artefact is not committed.
        CorruptObjectError: The manifest is torn or breaks its format.
        SchemaVersionError: It is newer than this code.
    """
    return read_model(store, manifest_key(folder), Manifest, MANIFEST_FORMAT)


def find_valid(
    store: Store, folder: str, *, input_fingerprint: str | None = None, is_hash_checked: bool = False
) -> Manifest | None:
    """Return the manifest of an artefact if it can be relied on, else ``None``.

    Args:
        store: Where from.
        folder: Artefact folder.
        input_fingerprint: If given, the manifest must have been made from these inputs.
        is_hash_checked: Also read every part and compare its SHA-256.

    Raises:
        SchemaVersionError: The artefact is newer than this code; replacing it would destroy it.
    """
    try:
        manifest = load_manifest(store, folder)
    except (ObjectMissingError, CorruptObjectError):
        return None
    if input_fingerprint is not None and manifest.input_fingerprint != input_fingerprint:
        return None
    return None if part_faults(store, manifest, is_hash_checked=is_hash_checked) else manifest


def part_faults(store: Store, manifest: Manifest, *, is_hash_checked: bool = False) -> list[str]:
    """Return a sentence for each part that is missing, has the wrong size or, if asked, the wrong SHA-256."""
    faults = []
    for part in manifest.parts:
        size = store.size(part.path)
        if size is None:
            faults.append(f"{part.path} is missing")
        elif size != part.size:
            faults.append(f"{part.path} has {size} bytes, its manifest says {part.size}")
        elif is_hash_checked and (found := sha256_of_object(store, part.path)) != part.sha256:
            faults.append(f"{part.path} has SHA-256 {found[:12]}, its manifest says {part.sha256[:12]}")
    return faults


def read_part(store: Store, part: Part) -> bytes:
    """Return a part's bytes after comparing size and SHA-256.

    Raises:
        ObjectMissingError: The object is gone.
        CorruptObjectError: Its size or SHA-256 differs.
    """
    data = store.read_bytes(part.path)
    found = hashlib.sha256(data).hexdigest()
    if len(data) != part.size or found != part.sha256:
        raise corrupt_part(store, part, len(data), found)
    return data


def corrupt_part(store: Store, part: Part, size: int, sha256: str) -> CorruptObjectError:
    """Return the error for a part whose bytes differ from its manifest."""
    message = (
        f"{store.url}/{part.path} has {size} bytes with SHA-256 {sha256[:12]}, its manifest says {part.size} bytes "
        f"with {part.sha256[:12]}; run `motley verify` and repeat the stage that wrote it"
    )
    return CorruptObjectError(message, key=part.path)


def check_schema_version(manifest: Manifest, newest: int) -> None:
    """Refuse an artefact whose data objects are newer than this code.

    Raises:
        SchemaVersionError: ``manifest.schema_version > newest``.
    """
    if manifest.schema_version > newest:
        message = (
            f"{manifest.key}: schema version {manifest.schema_version} of {manifest.kind} is newer than "
            f"{newest}, the newest that this code reads; update Motley"
        )
        raise SchemaVersionError(message, key=manifest.key)


def digest_of_parts(parts: Iterable[Part]) -> str:
    """Return the SHA-256 over names, sizes, hashes and rows of parts, whatever attempt wrote them."""
    return fingerprint(sorted([part.name, part.size, part.sha256, part.rows] for part in parts))


def sha256_of_object(store: Store, key: str) -> str:
    """Return the SHA-256 (hex) of an object, read in bounded memory."""
    digest = hashlib.sha256()
    with store.open_input(key) as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_file(path: Path) -> tuple[int, str]:
    """Return length in bytes and SHA-256 (hex) of a local file, read in bounded memory."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def _described(name: str, path: str, source: PartSource) -> Part:
    if source.known is not None:
        size, sha256 = source.known
        return Part(name=name, path=path, size=size, sha256=sha256, rows=source.rows)
    if isinstance(source.data, Path):
        size, sha256 = sha256_of_file(source.data)
        return Part(name=name, path=path, size=size, sha256=sha256, rows=source.rows)
    sha256 = hashlib.sha256(source.data).hexdigest()
    return Part(name=name, path=path, size=len(source.data), sha256=sha256, rows=source.rows)


def _write_part(store: Store, part: Part, source: PartSource) -> None:
    if isinstance(source.data, Path):
        store.publish_file(part.path, source.data)
    else:
        store.publish(part.path, source.data)
