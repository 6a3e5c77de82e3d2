"""Stage weight_sync: the newest committed policy comes into a region and into its live generation engines."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import JsonValue

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.errors import ContractError
from stages.policy_files import fetch_local, policy_at_home
from stages.sharding import local_replicas
from storage.adapter_policies import base_of
from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import manifest_key, policy_folder
from storage.manifest import Part
from storage.policies import Policy, head_version, resolve_policy
from storage.policy_copies import find_copy, publish_copy, send_file
from storage.policy_deltas import delta_file, open_delta
from storage.policy_fetch import FetchedPolicy


def run_stage(context: StageContext) -> StageOutcome:
    """Copy, load, prove. Engines that are not running load the weights when they start."""
    region = context.param("region", context.run.roots)
    if region != context.machine.region:
        raise ContractError(
            f"request of stage weight_sync: region is {region}, but machine {context.machine.name} is in "
            f"{context.machine.region}; run it on a machine of the region."
        )
    run, wanted = context.run.name, context.iteration + 1
    head = head_version(context.home, run)
    if head is None or head < wanted:
        raise ContractError(
            f"run {run}: version {wanted} is synced into {region}, but the newest committed version is {head}; run "
            "stage commit_policy first."
        )
    policy = policy_at_home(context, head)
    below = _copy(context, base_of(context.home, policy)) if policy.adapter is not None else None
    copied = _copy(context, policy)
    loaded = [replica for replica in _replicas(context) if _load(context, replica)]
    metrics: dict[str, JsonValue] = {
        "region": region,
        "policy_version": policy.version,
        "weights_hash": policy.weights_hash,
        "bytes": copied.num_bytes if copied is not None else 0,
        # Of an adapter's base, which is copied once and is there when the next adapter comes.
        "base_bytes": below.num_bytes if below is not None else 0,
        "form": copied.form if copied is not None else None,
        "doubts": [*copied.doubts] if copied is not None else [],
        "engines": len(loaded),
    }
    key = manifest_key(policy_folder(run, policy.version))
    return StageOutcome(reused=copied is None and not loaded, artefacts=(key,), metrics=metrics)


def _copy(context: StageContext, policy: Policy) -> FetchedPolicy | None:
    """Bring the policy into the region's root, by its delta where that is possible; None when it is there.

    The link to the home region is crossed once: what arrives is proved on this machine, and from there it goes into the
    region's store, where the other machines of the region read it. A version that comes whole goes on file by file,
    each while the next one is still on the link.
    """
    if context.store is context.home or find_copy(context.store, policy) is not None:
        return None
    attempt, base, sent = context.request.attempt, _base_in_region(context, policy), set[str]()
    work = context.state_dir / "work" / context.run.name / f"sync-{policy.version}-{attempt}"

    def pass_on(part: Part, path: Path) -> None:
        if base is None:  # else the region gets the delta alone
            send_file(context.store, policy, part, path, attempt)
            sent.add(part.name)

    try:
        fetched = fetch_local(context, policy, [context.home], deltas=work, proved=pass_on)
        with context.phase("copy"):
            publish_copy(
                context.store,
                fetched.local,
                policy,
                delta=_delta(context, policy, work),
                base=base,
                created_by=context.created_by,
                attempt=attempt,
                sent=sent,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return fetched


def _delta(context: StageContext, policy: Policy, work: Path) -> Path | None:
    """Return the delta that the version carries, on this machine."""
    if policy.delta is None:
        return None
    open_delta(context.home, policy, work)
    return delta_file(policy, work)


def _base_in_region(context: StageContext, policy: Policy) -> Policy | None:
    """Return the region's version that the delta starts from; None where the copy is to be an anchor."""
    if policy.delta is None or policy.version % context.job.storage.anchor_every == 0:
        return None
    try:
        base = resolve_policy(context.store, policy.run, policy.delta.base_version)
    except (ObjectMissingError, CorruptObjectError):
        return None
    is_same = base.weights_hash == policy.delta.base_weights_hash
    return base if is_same and find_copy(context.store, base) is not None else None


def _replicas(context: StageContext) -> list[int]:
    return local_replicas(context.plan.tasks[RlTask.ACTOR_GENERATION], context.machine.name)


def _load(context: StageContext, replica: int) -> bool:
    """Load the newest policy into a replica's engine if that is running and holds another version."""

    def newest() -> Policy:
        # Looked up when the engine is free: another stage may have taken it further meanwhile, and it never goes back.
        head = head_version(context.home, context.run.name)
        return policy_at_home(context, context.iteration + 1 if head is None else head)

    with context.phase("load"):
        return context.engines.refresh_generation(replica, newest)
