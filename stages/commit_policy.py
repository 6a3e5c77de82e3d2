"""Stage commit_policy: version k + 1 becomes the authoritative policy; then retention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import UTC, datetime

from pydantic import JsonValue

from stages.context import StageContext, StageOutcome
from stages.critic_versions import critic_at_home
from stages.engines.file_lock import exclusive
from stages.errors import ContractError
from stages.policy_files import policy_at_home
from stages.rollout_policy import needed_rollouts, rollout_rule
from stages.rollout_shards import region_stores
from storage.adapter_policies import base_of
from storage.checkpoints import load_checkpoint
from storage.errors import CorruptObjectError
from storage.gangs import remove_gangs
from storage.layout import (
    checkpoints_folder,
    critic_folder,
    critics_folder,
    iteration_folder,
    metrics_folder,
    policies_folder,
    policy_folder,
    policy_head,
)
from storage.manifest import find_valid
from storage.policies import advance_head, head_version
from storage.retention import RetentionRule, apply_retention, collect_orphans
from storage.rollout_retention import old_rollouts, remove_rollouts


def run_stage(context: StageContext) -> StageOutcome:
    """Check what was trained, object by object, and advance the head."""
    run, version, home = context.run.name, context.iteration + 1, context.home
    head = head_version(home, run)
    if head is None or head < version - 1:
        raise ContractError(
            f"run {run}: version {version} follows {version - 1}, but the newest committed version is {head}; finish "
            "the earlier iterations first."
        )
    is_reused = head >= version
    if not is_reused:
        with context.phase("verify"):
            if find_valid(home, policy_folder(run, version), is_hash_checked=True) is None:
                raise CorruptObjectError(
                    f"run {run}: policy version {version} is not published, or its files differ from its manifest; "
                    "repeat stage train.",
                    key=policy_folder(run, version),
                )
            policy = policy_at_home(context, version)
            if policy.adapter is not None:
                base_of(home, policy)
            load_checkpoint(home, run, version, config_hash=context.job.fingerprint)
            if context.job.ppo is not None:
                _verify_critic(context, version)
        with context.phase("commit"):
            advance_head(home, run, version)
        context.log("committed", version=version)
    with context.phase("retention"), _retention_alone(context):
        deleted, num_orphans = _retain(context)
        removed = _remove_old_rollouts(context)
    metrics: dict[str, JsonValue] = {
        "policy_version": head_version(home, run),
        "weights_hash": policy_at_home(context, version).weights_hash if not is_reused else None,
        "deleted": [*deleted],
        "num_orphans_deleted": num_orphans,
        "rollouts_removed": [*removed],
    }
    return StageOutcome(reused=is_reused, artefacts=(policy_head(run),), metrics=metrics)


def _verify_critic(context: StageContext, version: int) -> None:
    """Refuse to commit a policy without its critic, or with one that learned from other data."""
    run, home = context.run.name, context.home
    if find_valid(home, critic_folder(run, version), is_hash_checked=True) is None:
        raise CorruptObjectError(
            f"run {run}: critic version {version} is not published, or its files differ from its manifest; repeat "
            "stage critic_training.",
            key=critic_folder(run, version),
        )
    policy, critic = policy_at_home(context, version), critic_at_home(context, version)
    if policy.manifest.metadata.get("data") != critic.manifest.metadata.get("data"):
        raise ContractError(
            f"run {run}: policy version {version} and critic version {version} were trained on different rollouts, "
            "rewards or values; repeat stages train and critic_training, the one of older data trains anew.",
            policy=policy.manifest.key,
            critic=critic.manifest.key,
        )


def retention_rule(context: StageContext) -> RetentionRule:
    """Return which versions the run keeps."""
    storage = context.job.storage
    return RetentionRule(
        keep_newest=storage.keep_policies,
        keep_checkpoints=storage.keep_checkpoints,
        keep_every=storage.keep_every or None,
        max_staleness=context.rollout_lag,
    )


def _retention_alone(context: StageContext) -> AbstractContextManager[None]:
    """Wait for another attempt at this stage that is still cleaning: two passes would take each other's marks back."""
    context.state_dir.mkdir(parents=True, exist_ok=True)
    path = context.state_dir / f"retention-{context.run.name}.lock"
    return exclusive(path, context.deadline.ends_at, f"retention of run {context.run.name}")


def _retain(context: StageContext) -> tuple[list[str], int]:
    """Free what nothing needs any more: old versions, and what attempts left that died."""
    now = datetime.fromtimestamp(context.clock.now(), UTC)
    run, home, k = context.run.name, context.home, context.iteration
    copies = [store for store in region_stores(context) if store is not home]
    report = apply_retention(home, run, retention_rule(context), now, copies=copies)
    is_last = k + 1 == context.run.iterations
    recent_iterations = range(max(0, k - context.rollout_lag - 1), k + 1)
    remove_gangs(home, run, range(k + 1) if is_last else recent_iterations, now)
    recent = [iteration_folder(run, i) for i in recent_iterations]
    versions = [policies_folder(run), checkpoints_folder(run), critics_folder(run)]
    folders = None if is_last else [*versions, metrics_folder(run), *recent]
    orphans = [
        key
        for store in (home, *copies)
        for key in collect_orphans(store, run, now=now, leases_at=home, folders=folders)
    ]
    if orphans:
        context.log("removed what dead or replaced attempts left", objects=len(orphans), first=orphans[0])
    return report.deleted, len(orphans)


def _remove_old_rollouts(context: StageContext) -> list[int]:
    """Remove the rollouts that the job keeps no longer; return their iterations."""
    rule = rollout_rule(context.job.storage)
    if rule is None:
        return []
    run, now = context.run.name, datetime.fromtimestamp(context.clock.now(), UTC)
    stores = [context.home, *(store for store in region_stores(context) if store is not context.home)]
    # Earlier iterations may have been spared for a lease or a resume point: all are looked at.
    old = old_rollouts(
        stores, run, rule, now, iterations=range(context.iteration), needed=needed_rollouts(context.home, run)
    )
    gone = remove_rollouts(stores, run, rule, now, old)
    for entry in old:
        said = "kept" if entry.why_kept else "removed" if entry in gone else "kept for a stage that just began"
        context.log(f"old rollouts {said}", iteration=entry.iteration, rows=entry.rows, bytes=entry.size_bytes,
                    because=entry.why_kept or str(rule))  # fmt: skip
    return [entry.iteration for entry in gone]
