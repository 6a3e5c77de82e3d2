"""Policy versions that are an adapter on a whole version: what they belong to, and proof of both.

The files are a PEFT adapter (`adapter_model.safetensors`, `adapter_config.json`), a few per mille of the model. Every
such version is relative to one whole version, never to another adapter, so a chain has two links: what a reader needs
is the base and one adapter. The hash of such a version is over the base's hash and the adapter's tensors; the manifest
also has the SHA-256 of each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from storage.errors import CorruptObjectError, ObjectMissingError
from storage.policies import LocalPolicy, Policy, resolve_policy
from storage.store import Store
from storage.weights_hash import adapter_hash, tensor_digests

MAX_LISTED = 5


def base_of(store: Store, policy: Policy) -> Policy:
    """Return the whole version that an adapter belongs to, as a store has it.

    Args:
        store: Where both are committed.
        policy: A version whose files are an adapter.

    Raises:
        ObjectMissingError: The base is not committed there.
        CorruptObjectError: What is committed under its number has other weights, or is an adapter itself.
    """
    link = policy.adapter
    where = f"{store.url}/{policy.manifest.key}: version {policy.version}"
    if link is None:
        raise CorruptObjectError(f"{where} is whole and has no base", key=policy.manifest.key)
    needed = f"is an adapter on version {link.base_version} with weights {link.base_weights_hash[:12]}"
    try:
        base = resolve_policy(store, policy.run, link.base_version)
    except ObjectMissingError as error:
        message = f"{where} {needed}, which is not committed there; copy the base first, or run `motley verify`"
        raise ObjectMissingError(message, key=policy.manifest.key) from error
    if base.weights_hash != link.base_weights_hash:
        message = f"{where} {needed}, but that version has {base.weights_hash[:12]}; run `motley verify`"
        raise CorruptObjectError(message, key=policy.manifest.key)
    if base.adapter is not None:
        message = f"{where} {needed}, which is an adapter itself; adapters are never stacked, so it can't be used"
        raise CorruptObjectError(message, key=policy.manifest.key)
    return base


def prove_adapter(local: LocalPolicy) -> None:
    """Compare every tensor of an adapter's files with what its manifest says, and their hash with the version's.

    Raises:
        CorruptObjectError: A file is torn or missing, a tensor is another one, or the manifest contradicts itself.
    """
    policy = local.policy
    promised = _promised(policy)
    missing = [part.name for part in policy.files if not (local.folder / part.name).is_file()]
    if missing:
        raise _unproved(policy, local.folder, f"{', '.join(missing)} is missing")
    found = tensor_digests(local.weight_files())
    wrong = sorted(name for name in {*promised, *found} if promised.get(name) != found.get(name))
    if wrong:
        rest = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
        raise _unproved(policy, local.folder, f"tensors differ: {', '.join(wrong[:MAX_LISTED])}{rest}")
    link = policy.adapter
    if link is None or adapter_hash(link.base_weights_hash, found) != policy.weights_hash:
        raise _unproved(policy, local.folder, "base and tensors do not give the version's hash")


def _promised(policy: Policy) -> Mapping[str, str]:
    facts = policy.manifest.metadata.get("adapter")
    tensors = facts.get("tensors") if isinstance(facts, Mapping) else None
    if not isinstance(tensors, Mapping) or not tensors:
        message = f"{policy.manifest.key}: what it says of its adapter's tensors is damaged; run `motley verify`"
        raise CorruptObjectError(message, key=policy.manifest.key)
    return {str(name): str(digest) for name, digest in tensors.items()}


def _unproved(policy: Policy, folder: Path, why: str) -> CorruptObjectError:
    message = (
        f"{folder} is not the adapter of policy version {policy.version} of run {policy.run}: {why}; remove the folder "
        "if it is a cache, else run `motley verify`"
    )
    return CorruptObjectError(message, key=policy.manifest.key)
