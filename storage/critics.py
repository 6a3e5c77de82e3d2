"""Critic versions (PPO): weights and resume point of the value model in one commit.

Critic version k belongs to policy version k and is authoritative exactly when that is: ``policies/head.json`` is the
one place where an iteration commits both. A critic beyond the head is work that is done but not yet in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.documents import fingerprint
from storage.errors import CorruptObjectError, ResumeMismatchError
from storage.layout import critic_folder, manifest_key
from storage.manifest import Manifest, PartSource, commit, load_manifest
from storage.policies import num_rollbacks, read_head
from storage.store import Store
from storage.weights_hash import weights_hash

CRITIC_KIND = "critic"
MODEL_FOLDER = "model"
"""Folder of the weights, configuration and tokenizer among a critic's files."""
TRAINER_FOLDER = "trainer"
"""Folder of optimiser, counts and random states among a critic's files."""


@dataclass(frozen=True, slots=True)
class Critic:
    """A committed critic version."""

    run: str
    """Run name."""
    version: int
    """Version; trained beside the policy of the same version."""
    weights_hash: str
    """SHA-256 over its tensors (``storage.weights_hash``)."""
    manifest: Manifest
    """Its manifest; ``metadata`` holds what the publisher gave."""


def publish_critic(
    store: Store,
    run: str,
    version: int,
    model_files: Mapping[str, bytes | Path],
    trainer_files: Mapping[str, bytes | Path],
    *,
    config_hash: str,
    dataset_fingerprint: str,
    created_by: str,
    metadata: Mapping[str, Any] | None = None,
    attempt: str | None = None,
) -> Critic:
    """Commit a critic version; the same content again is success.

    Args:
        store: Where to.
        run: Run name.
        version: Version of the policy that it belongs to.
        model_files: A whole model directory by file name.
        trainer_files: Optimiser, counts and random states by file name.
        config_hash: SHA-256 of the settings that must be the same at resume.
        dataset_fingerprint: SHA-256 of the data set.
        created_by: Who commits.
        metadata: JSON-able extras.
        attempt: Token of this attempt; default a fresh one.

    Raises:
        AlreadyPublishedError: The version is committed with other content.
        CorruptObjectError: A safetensors file is truncated or malformed; nothing is published.
    """
    digest = weights_hash(model_files)
    sources = {f"{MODEL_FOLDER}/{name}": PartSource(data) for name, data in model_files.items()}
    sources |= {f"{TRAINER_FOLDER}/{name}": PartSource(data) for name, data in trainer_files.items()}
    rollbacks = num_rollbacks(read_head(store, run), version)
    manifest = commit(
        store,
        critic_folder(run, version),
        sources,
        kind=CRITIC_KIND,
        input_fingerprint=fingerprint(CRITIC_KIND, run, version, rollbacks),
        created_by=created_by,
        policy_versions=(version,),
        metadata={
            **(metadata or {}),
            "weights_hash": digest,
            "config_hash": config_hash,
            "dataset_fingerprint": dataset_fingerprint,
        },
        attempt=attempt,
    )
    return _critic(store, run, version, manifest)


def resolve_critic(
    store: Store, run: str, version: int, *, config_hash: str | None = None, dataset_fingerprint: str | None = None
) -> Critic:
    """Return a committed critic version.

    Args:
        store: Where from.
        run: Run name.
        version: Version.
        config_hash: If given, must be the critic's.
        dataset_fingerprint: If given, must be the critic's.

    Raises:
        ObjectMissingError: Not committed.
        CorruptObjectError: Its manifest is damaged.
        ResumeMismatchError: It belongs to another configuration or data set.
    """
    critic = _critic(store, run, version, load_manifest(store, critic_folder(run, version)))
    wanted = {"config_hash": config_hash, "dataset_fingerprint": dataset_fingerprint}
    faults = [
        f"{name} is {str(critic.manifest.metadata.get(name))[:12]}, this run's is {value[:12]}"
        for name, value in wanted.items()
        if value is not None and critic.manifest.metadata.get(name) != value
    ]
    if faults:
        message = (
            f"critic version {version} of run {run} does not fit: {'; '.join(faults)}; resume with the settings and "
            "data that it was made with, or start a new run"
        )
        raise ResumeMismatchError(message, key=critic.manifest.key)
    return critic


def local_critic_folder(store: Store, critic: Critic) -> Path | None:
    """Return the folder that holds ``model`` and ``trainer`` of a critic, ``None`` for remote stores."""
    return store.local_path(f"{critic_folder(critic.run, critic.version)}/{critic.manifest.attempt}")


def _critic(store: Store, run: str, version: int, manifest: Manifest) -> Critic:
    digest = manifest.metadata.get("weights_hash")
    if manifest.kind != CRITIC_KIND or manifest.policy_versions != (version,) or not isinstance(digest, str):
        message = f"{store.url}/{manifest.key} is no manifest of critic version {version}; run `motley verify`"
        raise CorruptObjectError(message, key=manifest_key(critic_folder(run, version)))
    return Critic(run, version, digest, manifest)
