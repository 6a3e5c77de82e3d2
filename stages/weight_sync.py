"""Stage weight_sync: the newest committed policy comes into a region and into its live generation engines."""

from __future__ import annotations

from pydantic import JsonValue

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.errors import ContractError
from stages.policy_files import files_of, policy_at_home, policy_directory
from stages.sharding import local_replicas
from storage.layout import manifest_key, policy_folder
from storage.manifest import find_valid
from storage.policies import Policy, head_version, publish_policy


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
    is_copied = _copy(context, policy)
    loaded = [replica for replica in _replicas(context) if _load(context, replica)]
    metrics: dict[str, JsonValue] = {
        "region": region,
        "policy_version": policy.version,
        "weights_hash": policy.weights_hash,
        "bytes": policy.manifest.size if is_copied else 0,
        "engines": len(loaded),
    }
    key = manifest_key(policy_folder(run, policy.version))
    return StageOutcome(reused=not is_copied and not loaded, artefacts=(key,), metrics=metrics)


def _copy(context: StageContext, policy: Policy) -> bool:
    """Make the policy available in the region's root; False when it is there."""
    if context.store is context.home:
        return False
    standing = find_valid(context.store, policy_folder(policy.run, policy.version))
    if standing is not None and standing.metadata.get("weights_hash") == policy.weights_hash:
        return False
    directory = policy_directory(context, policy)
    with context.phase("copy"):
        publish_policy(
            context.store,
            policy.run,
            policy.version,
            files_of(directory),
            created_by=context.created_by,
            metadata={name: value for name, value in policy.manifest.metadata.items() if name != "weights_hash"},
            is_head=False,
            attempt=context.request.attempt,
        )
    return True


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
