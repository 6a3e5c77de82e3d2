"""Publishing of a policy version with its resume point, from the training engine; used by prepare and train."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.context import StageContext
from stages.engines.adapter_files import BASE_VERSION
from stages.engines.canary import CanaryRecord
from stages.engines.client import RemoteEngine
from stages.engines.protocol import ScoredTokens
from stages.policy_files import files_of, keep_local, local_policy, policy_at_home
from stages.staleness.buffer import RolloutBuffer
from storage.checkpoints import save_checkpoint
from storage.policies import LocalPolicy, Policy, publish_policy


def publish_version(
    context: StageContext,
    engine: RemoteEngine,
    version: int,
    *,
    dataset_fingerprint: str,
    canary_rows: Sequence[ScoredTokens],
    metadata: Mapping[str, Any],
    is_head: bool,
    buffer: RolloutBuffer,
    trainer_state: Mapping[str, Any] | None = None,
    when_saved: Callable[[], None] | None = None,
) -> Policy:
    """Save what the training engine holds: first the resume point, then the policy, whose manifest marks the end.

    The policy carries the canary: the trainer's own log-probs on fixed rows under exactly these weights.

    Args:
        context: The stage.
        engine: Training engine; afterwards it holds `version`.
        version: Policy version to publish.
        dataset_fingerprint: SHA-256 of the dataset.
        canary_rows: Fixed rows, the same ones for the whole run.
        metadata: JSON-able facts for the policy's manifest.
        is_head: Also make it the authoritative version.
        buffer: Rollouts that wait at this version; part of the resume point.
        trainer_state: JSON-able state beside the engine's, e.g. of a controller; kept in the resume point's manifest.
        when_saved: Called when the engine is no longer needed, before anything is published; may refuse by an error.
    """
    work = _work_folder(context, version)
    policy_dir, trainer_dir = work / "policy", work / "trainer"
    try:
        with context.phase("save"):
            engine.save(policy_dir, trainer_dir, version)
        with context.phase("canary"):
            canary = CanaryRecord(rows=canary_rows, trainer_logprobs=engine.score(canary_rows))
        if when_saved is not None:
            when_saved()
        with context.phase("publish"):
            files = files_of(trainer_dir)
            save_checkpoint(
                context.home,
                context.run.name,
                version,
                files,
                config_hash=context.job.fingerprint,
                dataset_fingerprint=dataset_fingerprint,
                data_position={"iteration": version},
                metadata={**(trainer_state or {}), "buffer": buffer.to_json()},
                rng_files=[name for name in files if name.startswith("random_rank_")],
                created_by=context.created_by,
                attempt=context.request.attempt,
            )
            policy = publish_policy(
                context.home,
                context.run.name,
                version,
                files_of(policy_dir),
                created_by=context.created_by,
                metadata={**metadata, "canary": canary.to_json()},
                is_head=is_head,
                attempt=context.request.attempt,
                base=_delta_base(context, version),
                adapter_base=_adapter_base(context, version),
            )
        keep_local(context, policy, policy_dir)
        return policy
    finally:
        shutil.rmtree(work, ignore_errors=True)


def save_for_lead(
    context: StageContext, engine: RemoteEngine, version: int, canary_rows: Sequence[ScoredTokens]
) -> None:
    """Do what the other machines of a gang must for `publish_version` on the lead: save and score with it.

    Nothing stays here; the files go to the lead's machine over the ranks' connections.
    """
    work = _work_folder(context, version)
    try:
        with context.phase("save"):
            engine.save(work / "policy", work / "trainer", version)
        with context.phase("canary"):
            engine.score(canary_rows)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _work_folder(context: StageContext, version: int) -> Path:
    work = context.state_dir / "work" / context.run.name / f"{version}-{context.request.attempt}"
    for left in work.parent.glob("[0-9]*-*"):  # training is serial: whoever left this is dead
        shutil.rmtree(left, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def _adapter_base(context: StageContext, version: int) -> Policy | None:
    """Return what the version is an adapter on: always the same one, so that no chain grows; None where it is whole."""
    is_whole = context.job.engines.training.lora is None or version == BASE_VERSION
    return None if is_whole else policy_at_home(context, BASE_VERSION)


def _delta_base(context: StageContext, version: int) -> LocalPolicy | None:
    """Return the version before, if somebody in another region (or on another machine) is served by a delta from it."""
    if context.job.engines.training.lora is not None:
        return None
    is_anchor = version % context.job.storage.anchor_every == 0
    is_in_place = context.home.local_path(context.run.name) is not None
    if is_anchor or (is_in_place and len({*context.run.roots.values()}) == 1):
        return None
    return local_policy(context, version - 1)
