"""Versions of the critic (PPO): the first one, loading with proof, publishing.

Critic version k goes with policy version k. It is in force when that is: the head decides about both.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.context import StageContext
from stages.engines.canary import SAME_ENGINE_GAP, CanaryRecord, check_canary
from stages.errors import ContractError, WeightMismatchError
from stages.model_children import run_heads
from stages.policy_files import files_of, prune_copies
from storage.critics import (
    MODEL_FOLDER,
    TRAINER_FOLDER,
    Critic,
    local_critic_folder,
    publish_critic,
    resolve_critic,
)
from storage.errors import CorruptObjectError
from storage.layout import critic_folder
from storage.manifest import sha256_of_file
from storage.policies import head_version

if TYPE_CHECKING:  # the client loads an HTTP library, which stages without an engine don't need
    from stages.engines.client import RemoteEngine


def authoritative_critic(context: StageContext) -> Critic | None:
    """Return critic version k, or None when iteration k is committed already.

    Raises:
        ContractError: version k is not authoritative yet: an earlier iteration is missing.
    """
    k, run = context.iteration, context.run.name
    head = head_version(context.home, run)
    if head is not None and head > k:
        return None
    if head != k:
        raise ContractError(
            f"run {run}: iteration {k} needs critic version {k}, but the newest committed version is {head}; finish "
            "the earlier iterations first."
        )
    return critic_at_home(context, k)


def critic_at_home(context: StageContext, version: int) -> Critic:
    """Return a committed critic version of the home region, refused when it is of another configuration."""
    return resolve_critic(context.home, context.run.name, version, config_hash=context.job.fingerprint)


def critic_directories(context: StageContext, version: int) -> tuple[Path, Path]:
    """Return local directories of a critic's model and of its resume point; they stay while the stage works.

    Raises:
        CorruptObjectError: a file differs from its manifest.
        ObjectMissingError: retention has deleted the version, or is about to.
    """
    context.lease.hold(critics=[version])
    critic = critic_at_home(context, version)
    local = local_critic_folder(context.home, critic)
    folder = local if local is not None and local.is_dir() else _fetched(context, critic)
    return folder / MODEL_FOLDER, folder / TRAINER_FOLDER


def load_critic(context: StageContext, engine: RemoteEngine, critic: Critic, *, is_for_training: bool) -> None:
    """Bring an engine to a critic version, unless it proves that it is there.

    Args:
        context: The stage.
        engine: A critic engine.
        critic: The version.
        is_for_training: Also load the optimizer; an engine that only infers needs none.

    Raises:
        WeightMismatchError: the loaded weights don't give the values that were published with the version.
    """
    record = _canary(critic)
    info = engine.info()
    if info.policy_version == critic.version:
        with context.phase("canary"):
            try:
                _check(record, engine, SAME_ENGINE_GAP)
            except WeightMismatchError:
                context.log("the critic engine is at another point than its version says", version=critic.version)
            else:
                return
    model_dir, trainer_dir = critic_directories(context, critic.version)
    with context.phase("load_checkpoint"):
        context.log("load", role="critic", version=critic.version)
        engine.load_checkpoint(model_dir, trainer_dir if is_for_training else None, critic.version, critic.weights_hash)
        try:
            _check(record, engine, context.job.canary_max_gap)
        except WeightMismatchError:
            context.engines.discard(engine)
            raise


def publish_critic_version(
    context: StageContext,
    engine: RemoteEngine,
    version: int,
    *,
    dataset_fingerprint: str,
    canary: CanaryRecord,
    metadata: Mapping[str, Any],
) -> Critic:
    """Save what the critic's engine holds, with its own values on the canary rows.

    Args:
        context: The stage.
        engine: Critic engine; afterwards it holds `version`.
        version: Version to publish.
        dataset_fingerprint: SHA-256 of the dataset.
        canary: Of the policy; its rows are taken.
        metadata: JSON-able facts for the manifest.
    """
    work = context.state_dir / "work" / context.run.name / f"critic-{version}-{context.request.attempt}"
    for left in work.parent.glob("critic-[0-9]*"):  # training is serial: whoever left this is dead
        shutil.rmtree(left, ignore_errors=True)
    work.mkdir(parents=True)
    model_dir, trainer_dir = work / MODEL_FOLDER, work / TRAINER_FOLDER
    try:
        with context.phase("save"):
            engine.save(model_dir, trainer_dir, version)
        with context.phase("canary"):
            proof = CanaryRecord(rows=canary.rows, trainer_logprobs=engine.values(canary.rows))
        with context.phase("publish"):
            return publish_critic(
                context.home,
                context.run.name,
                version,
                files_of(model_dir),
                files_of(trainer_dir),
                config_hash=context.job.fingerprint,
                dataset_fingerprint=dataset_fingerprint,
                created_by=context.created_by,
                metadata={**metadata, "canary": proof.to_json()},
                attempt=context.request.attempt,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def make_first_critic(context: StageContext, backbone: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory of the critic that a backbone gives and what is known of it; a child process makes it.

    Args:
        context: The stage.
        backbone: The actor's first weights, or `models.critic.path` of the job.
        folder: Work folder; made anew.

    Raises:
        SpecFaultsError: the backbone is not of the critic's shape, or has missing or unknown tensors.
    """
    critic = context.job.planner.models.critic
    if critic is None:
        raise ContractError("the job has no models.critic.")
    with context.phase("critic"):
        facts = run_heads(
            folder,
            {"backbone": str(backbone), "shape": critic.llm.model_dump(mode="json")},
            context.deadline.remaining_s("the first critic"),
            "making the first critic",
        )
    return folder / "critic", facts


def _check(record: CanaryRecord, engine: RemoteEngine, max_gap: float) -> None:
    values = engine.values(record.rows)
    check_canary(
        record, values, max_gap=max_gap, engine=engine.record.describe(), numbers="values", unit="reward units"
    )


def _canary(critic: Critic) -> CanaryRecord:
    document = critic.manifest.metadata.get("canary")
    if not isinstance(document, dict):
        raise ContractError(
            f"critic version {critic.version} of run {critic.run} carries no canary in {critic.manifest.key}; publish "
            "it with the stages of this version."
        )
    return CanaryRecord.from_json(document)


def _fetched(context: StageContext, critic: Critic) -> Path:
    cache = context.state_dir / "cache" / context.run.name / "critics"
    folder = cache / f"{critic.version}-{critic.manifest.content_digest[:16]}"
    prune_copies(context, cache, critic_folder)
    with context.phase("fetch_critic"):
        for part in critic.manifest.parts:
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
