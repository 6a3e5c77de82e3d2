"""Stage commit_policy: version k + 1 becomes the authoritative policy; then retention."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import JsonValue

from stages.context import StageContext, StageOutcome
from stages.critic_versions import critic_at_home
from stages.errors import ContractError
from stages.policy_files import policy_at_home
from stages.rollout_shards import region_stores
from storage.checkpoints import load_checkpoint
from storage.errors import CorruptObjectError
from storage.layout import critic_folder, policy_folder, policy_head
from storage.manifest import find_valid
from storage.policies import advance_head, head_version
from storage.retention import RetentionRule, apply_retention


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
            load_checkpoint(home, run, version, config_hash=context.job.fingerprint)
            if context.job.ppo is not None:
                _verify_critic(context, version)
        with context.phase("commit"):
            advance_head(home, run, version)
        context.log("committed", version=version)
    with context.phase("retention"):
        deleted = _retain(context)
    metrics: dict[str, JsonValue] = {
        "policy_version": head_version(home, run),
        "weights_hash": policy_at_home(context, version).weights_hash if not is_reused else None,
        "deleted": [*deleted],
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
        keep_newest=max(storage.keep_policies, storage.keep_checkpoints),
        keep_every=storage.keep_every or None,
        max_staleness=max(context.job.max_staleness, context.job.generate_ahead),
        grace_s=context.job.limits.stage_deadline_s,
    )


def _retain(context: StageContext) -> list[str]:
    now = datetime.fromtimestamp(context.clock.now(), UTC)
    rule = retention_rule(context)
    reports = [apply_retention(store, context.run.name, rule, now) for store in region_stores(context)]
    return [folder for report in reports for folder in report.deleted]
