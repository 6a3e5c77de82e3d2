"""Policy versions: publish and find; ``head.json`` names the authoritative one.

The head never goes back, except by an explicit rollback record (T9). Version k is the policy that iteration k
starts from; version 0 is the initial policy. A version may carry a delta from the version before it
(``storage.weight_delta``), and a region's copy may hold only that (``storage.policy_copies``); what a version
consists of is the same either way. Or a version is an adapter on a whole one (``storage.adapter_policies``).
``storage.policy_fetch`` brings one to this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from storage.documents import fingerprint, model_bytes, read_model
from storage.errors import CorruptObjectError, InvalidInputError, ObjectMissingError, PolicyVersionError
from storage.layout import manifest_key, policy_folder, policy_head
from storage.manifest import Manifest, Part, PartSource, commit, find_valid, load_manifest
from storage.store import Store
from storage.weights_hash import adapter_hash, combined_hash, tensor_digests

POLICY_KIND = "policy"
HEAD_FORMAT = "motley.policy_head/1"
DELTA_PART: Final = "delta/weights.delta"
"""File name of the delta that a version may carry."""


class Rollback(BaseModel):
    """Why the head was once set back."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    from_version: int
    """Head before."""
    to_version: int
    """Head after."""
    reason: str
    """Words of whoever asked for it."""
    at: datetime
    """When, UTC."""


class PolicyHead(BaseModel):
    """The document ``head.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.policy_head/1"] = "motley.policy_head/1"
    """Kind and version of this document."""
    version: int = Field(ge=0)
    """Authoritative policy version."""
    weights_hash: str
    """Hash of its tensors."""
    rollbacks: tuple[Rollback, ...] = ()
    """Every time that the head was set back, oldest first."""


@dataclass(frozen=True, slots=True)
class BaseLink:
    """What a version's delta, or its adapter, starts from."""

    base_version: int
    """Policy version of the base."""
    base_weights_hash: str
    """Hash of the base's tensors."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A committed policy version."""

    run: str
    """Run name."""
    version: int
    """Policy version."""
    weights_hash: str
    """SHA-256 over the tensors (``storage.weights_hash``)."""
    manifest: Manifest
    """Its manifest; ``metadata`` holds what the publisher gave."""
    files: tuple[Part, ...]
    """The files that the version consists of. Those of a whole version are parts of its manifest; of a copy that
    holds a delta only, they say what must come out of it."""
    delta: BaseLink | None = None
    """The delta that it carries, if any."""
    adapter: BaseLink | None = None
    """Where the files are an adapter, the whole version that it belongs to."""

    @property
    def is_whole(self) -> bool:
        """Whether every file of the version lies beside this manifest."""
        names = {part.name for part in self.manifest.parts}
        return all(part.name in names for part in self.files)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(part.size for part in self.files)


@dataclass(frozen=True, slots=True)
class LocalPolicy:
    """A version whose files lie on this machine, proved when they were put there."""

    policy: Policy
    """The version."""
    folder: Path
    """Folder with its files."""

    def weight_files(self) -> dict[str, Path]:
        """Return its safetensors files by name."""
        names = (part.name for part in self.policy.files if part.name.endswith(".safetensors"))
        return {name: self.folder / name for name in names}


def publish_policy(
    store: Store,
    run: str,
    version: int,
    files: Mapping[str, bytes | Path],
    *,
    created_by: str,
    metadata: Mapping[str, Any] | None = None,
    is_head: bool = True,
    attempt: str | None = None,
    base: LocalPolicy | None = None,
    adapter_base: Policy | None = None,
) -> Policy:
    """Commit a policy version and make it the head. Publishing the same tensors and files again is success.

    Args:
        store: Where to.
        run: Run name.
        version: Policy version; must not be below the head unless it is committed with the same content already.
        files: A whole model directory by file name: ``*.safetensors`` and configuration, tokenizer, template ...; or an
            adapter's.
        created_by: Who publishes.
        metadata: JSON-able extras (iteration, optimizer step, dtype ...).
        is_head: Also advance the head to this version.
        attempt: Token of this attempt; default a fresh one.
        base: The version before, on this machine: the new one then carries a delta from it, if that is much smaller.
        adapter_base: The files are an adapter on this version, which is whole; there is no delta then.

    Raises:
        AlreadyPublishedError: The version is committed with other content.
        PolicyVersionError: The version is below the head and was never committed.
        ObjectMissingError: The adapter's base is not committed.
        CorruptObjectError: A safetensors file is truncated or malformed; nothing is published.
        InvalidInputError: No safetensors file, or a base that no adapter can belong to.
    """
    if DELTA_PART in files:
        message = f"policy version {version}: file name {DELTA_PART} is kept for the delta; name the file otherwise"
        raise InvalidInputError(message)
    if base is not None and adapter_base is not None:
        message = f"policy version {version}: an adapter has no delta; give base or adapter_base"
        raise InvalidInputError(message)
    digests = tensor_digests(files)
    folder = policy_folder(run, version)
    head = read_head(store, run)
    if head is not None and version < head.version and find_valid(store, folder) is None:
        message = (
            f"{store.url}/{folder}: policy version {version} is below the head {head.version} and was never "
            "committed; use roll_back_head to go back on purpose"
        )
        raise PolicyVersionError(message, key=folder)
    sources = {name: PartSource(data) for name, data in files.items()}
    extras = _weights_facts(store, run, version, digests, adapter_base)
    delta = None if base is None else _delta_from(base, files, digests)
    if base is not None and delta is not None:
        sources[DELTA_PART] = PartSource(delta, is_derived=True)
        link = {"base_version": base.policy.version, "base_weights_hash": base.policy.weights_hash}
        extras["delta"] = link
    manifest = commit(
        store,
        folder,
        sources,
        kind=POLICY_KIND,
        input_fingerprint=fingerprint(POLICY_KIND, run, version, num_rollbacks(head, version)),
        created_by=created_by,
        policy_versions=(version,),
        metadata={**(metadata or {}), **extras},
        attempt=attempt,
    )
    policy = _policy(store, run, version, manifest)
    if is_head and (head is None or version > head.version):
        advance_head(store, run, version)
    return policy


def resolve_policy(store: Store, run: str, version: int | None = None) -> Policy:
    """Return a committed policy version, default the head.

    Raises:
        ObjectMissingError: Not committed.
        CorruptObjectError: Its manifest is damaged, or head and policy contradict each other.
    """
    head = read_head(store, run) if version is None else None
    if version is None and head is None:
        message = f"{store.url}/{policy_head(run)}: run {run} has no policy yet"
        raise ObjectMissingError(message, key=policy_head(run))
    wanted = head.version if head is not None else version
    policy = _policy(store, run, int(wanted or 0), load_manifest(store, policy_folder(run, int(wanted or 0))))
    if head is not None and head.weights_hash != policy.weights_hash:
        message = (
            f"{store.url}/{policy_head(run)} says version {head.version} has hash {head.weights_hash[:12]}, its "
            f"manifest {policy.weights_hash[:12]}; run `motley verify`"
        )
        raise CorruptObjectError(message, key=policy_head(run))
    return policy


def read_head(store: Store, run: str) -> PolicyHead | None:
    """Return the head document, ``None`` if the run has no policy yet."""
    try:
        return read_model(store, policy_head(run), PolicyHead, HEAD_FORMAT)
    except ObjectMissingError:
        return None


def head_version(store: Store, run: str) -> int | None:
    """Return the authoritative policy version, ``None`` if there is no policy yet. One small read, never waits."""
    head = read_head(store, run)
    return None if head is None else head.version


def advance_head(store: Store, run: str, version: int) -> PolicyHead:
    """Make a committed version the head; the head itself again is success.

    Raises:
        PolicyVersionError: The version is below the head.
        ObjectMissingError: The version is not committed.
    """
    head = read_head(store, run)
    policy = resolve_policy(store, run, version)
    if head is not None and version < head.version:
        message = f"run {run}: the head is {head.version} and never goes back to {version}; use roll_back_head"
        raise PolicyVersionError(message, key=policy_head(run))
    rollbacks = head.rollbacks if head is not None else ()
    return _publish_head(store, run, policy, rollbacks, head)


def roll_back_head(store: Store, run: str, version: int, *, reason: str, at: datetime) -> PolicyHead:
    """Set the head back on purpose and record why.

    Versions above the new head stay readable until they are published anew, which this permits.

    Args:
        store: Where.
        run: Run name.
        version: Committed version below the head.
        reason: Why, in words.
        at: When, UTC.

    Raises:
        PolicyVersionError: The version is not below the head.
        ObjectMissingError: The version is not committed.
        InvalidInputError: No reason given.
    """
    head = read_head(store, run)
    if not reason.strip():
        message = f"run {run}: a rollback of the head needs a reason"
        raise InvalidInputError(message)
    if head is None or version >= head.version:
        message = f"run {run}: the head is {None if head is None else head.version}, so {version} is no rollback"
        raise PolicyVersionError(message, key=policy_head(run))
    policy = resolve_policy(store, run, version)
    record = Rollback(from_version=head.version, to_version=version, reason=reason, at=at)
    return _publish_head(store, run, policy, (*head.rollbacks, record), head)


def num_rollbacks(head: PolicyHead | None, version: int) -> int:
    """Return how often the head was set back below a version: each time the version may be made anew."""
    return 0 if head is None else sum(entry.to_version < version for entry in head.rollbacks)


def _weights_facts(
    store: Store, run: str, version: int, digests: Mapping[str, str], base: Policy | None
) -> dict[str, Any]:
    """Return what a manifest says of the tensors; an adapter's base is looked up, since it must be there first."""
    if base is None:
        return {"weights_hash": combined_hash(digests)}
    found = resolve_policy(store, run, base.version)
    if found.weights_hash != base.weights_hash or found.adapter is not None or base.version >= version:
        message = (
            f"policy version {version} of run {run} can't be an adapter on version {base.version} with weights "
            f"{base.weights_hash[:12]}: its base is an earlier version of the same run with whole weights, and "
            f"{store.url} has {found.weights_hash[:12]} there"
        )
        raise InvalidInputError(message)
    link = {"base_version": base.version, "base_weights_hash": base.weights_hash, "tensors": dict(digests)}
    return {"weights_hash": adapter_hash(base.weights_hash, digests), "adapter": link}


def _delta_from(base: LocalPolicy, files: Mapping[str, bytes | Path], digests: Mapping[str, str]) -> bytes | None:
    from storage.weight_delta import encode_delta  # numpy: the Airflow side reads heads only

    return encode_delta(base.weight_files(), files, base_weights_hash=base.policy.weights_hash, digests=digests)


def _policy(store: Store, run: str, version: int, manifest: Manifest) -> Policy:
    digest = manifest.metadata.get("weights_hash")
    if manifest.kind != POLICY_KIND or manifest.policy_versions != (version,) or not isinstance(digest, str):
        message = f"{store.url}/{manifest.key} is no manifest of policy version {version}; run `motley verify`"
        raise CorruptObjectError(message, key=manifest_key(policy_folder(run, version)))
    try:
        return Policy(run, version, digest, manifest, *_form_of(manifest), _link(manifest.metadata.get("adapter")))
    except (KeyError, TypeError, ValueError) as error:
        message = f"{store.url}/{manifest.key}: what it says of its files or its delta is damaged ({error!r})"
        raise CorruptObjectError(message, key=manifest.key) from error


def _link(raw: Mapping[str, Any] | None) -> BaseLink | None:
    return None if raw is None else BaseLink(int(raw["base_version"]), str(raw["base_weights_hash"]))


def _form_of(manifest: Manifest) -> tuple[tuple[Part, ...], BaseLink | None]:
    """Return the files that a version consists of, and what its delta starts from."""
    link = _link(manifest.metadata.get("delta"))
    if link is None:
        return manifest.parts, None
    if (files := manifest.metadata.get("files")) is not None:
        return tuple(Part.model_validate(part) for part in files), link
    return tuple(part for part in manifest.parts if part.name != DELTA_PART), link


def _publish_head(
    store: Store, run: str, policy: Policy, rollbacks: tuple[Rollback, ...], before: PolicyHead | None
) -> PolicyHead:
    head = PolicyHead(version=policy.version, weights_hash=policy.weights_hash, rollbacks=rollbacks)
    if head != before:
        store.publish(policy_head(run), model_bytes(head, policy_head(run)))
    return head
