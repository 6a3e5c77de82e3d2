"""Stage critic_training (PPO): critic version k becomes k + 1, beside the policy's training and from the same data.

Nothing of it is in force until stage commit_policy advances the head over both; an attempt that finds critic k + 1 made
from the same data and the same critic k keeps it, so a crash between the two trainings trains neither twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from stages.context import StageContext, StageOutcome
from stages.critic_versions import (
    authoritative_critic,
    critic_at_home,
    critic_directories,
    load_critic,
    publish_critic_version,
)
from stages.engines.client import RemoteEngine
from stages.engines.protocol import CriticOutcome, CriticTrainingRequest
from stages.errors import ContractError
from stages.generate import run_prompts
from stages.kl_state import kl_weight_of
from stages.policy_files import policy_at_home
from stages.staleness.consumption import consume
from stages.step_documents import step_document
from stages.training_data import data_fingerprint, families_of, joined_rows
from stages.training_rows import PreparedRows, mini_batches, prepare_rows
from stages.weights_proof import canary_of
from storage.critics import Critic
from storage.documents import fingerprint
from storage.layout import critic_folder, manifest_key
from storage.manifest import find_valid


def run_stage(context: StageContext) -> StageOutcome:
    """Train the critic of one iteration, or find that it was trained."""
    k = context.iteration
    key = manifest_key(critic_folder(context.run.name, k + 1))
    critic = authoritative_critic(context)
    if critic is None:
        standing = critic_at_home(context, k + 1)
        return StageOutcome(reused=True, artefacts=(key,), metrics=dict(standing.manifest.metadata["training"]))
    with context.phase("find_shards"):
        consumption = consume(context, families_of(context.job))
    data = data_fingerprint(context, consumption)
    inputs = fingerprint("critic_training", critic.weights_hash, data)
    found = _standing(context, inputs)
    if found is not None:
        return StageOutcome(reused=True, artefacts=(key,), metrics=dict(found.manifest.metadata["training"]))
    if context.home.delete(key):
        context.log("discard", key=key)
    with context.phase("read"):
        prepared = prepare_rows(
            joined_rows(consumption),
            context.job,
            k,
            is_withheld=consumption.is_withheld,
            kl_weight=kl_weight_of(context),
        )
    base, _ = critic_directories(context, 0)
    with context.phase("engines"):
        engine = context.engines.critic_training(base)
    load_critic(context, engine, critic, is_for_training=True)
    steps = mini_batches(prepared, context.job, context.run.seed, k)
    context.log("train critic", version=k, rows=len(prepared.kept), optimizer_steps=len(steps))
    outcome = _train(context, engine, prepared, steps)
    metrics = _metrics(prepared, outcome)
    publish_critic_version(
        context,
        engine,
        k + 1,
        dataset_fingerprint=run_prompts(context).dataset_fingerprint,
        canary=canary_of(policy_at_home(context, 0)),
        metadata={
            "training": metrics, "inputs": inputs, "data": data, "iteration": k, "attempt": context.request.attempt
        },
    )  # fmt: skip
    return StageOutcome(artefacts=(key,), metrics=metrics)


def _standing(context: StageContext, inputs: str) -> Critic | None:
    """Return critic version k + 1 if an earlier attempt at the same inputs finished it."""
    if find_valid(context.home, critic_folder(context.run.name, context.iteration + 1)) is None:
        return None
    critic = critic_at_home(context, context.iteration + 1)
    return critic if critic.manifest.metadata.get("inputs") == inputs else None


def _train(
    context: StageContext, engine: RemoteEngine, prepared: PreparedRows, steps: Sequence[Sequence[int]]
) -> CriticOutcome | None:
    """Make the optimizer steps; None when no row is left."""
    job, ppo = context.job, context.job.ppo
    if ppo is None:
        raise ContractError("stage critic_training needs a job with algorithm: ppo.")
    if not steps:
        return None
    request = CriticTrainingRequest(
        rows=prepared.critic_rows(),
        mini_batches=steps,
        value_clip=ppo.value_clip,
        value_weight=ppo.value_weight,
        optimizer=ppo.critic_optimizer,
        total_optimizer_steps=job.iterations * job.optimizer_steps_per_iteration,
        micro_batch_tokens=job.planner.training.micro_batch_size * job.planner.lengths.total,
        max_non_finite_steps=job.limits.non_finite_steps,
    )
    with context.phase("train"):
        return engine.train_critic(request)


def _metrics(prepared: PreparedRows, outcome: CriticOutcome | None) -> dict[str, JsonValue]:
    """Return what the iteration says of the critic before its update, and of every optimizer step."""
    targets = prepared.tokens
    steps = [] if outcome is None else [step_document(step) for step in outcome.steps]
    kept = targets.mask if targets is not None else None
    return {
        "rows_trained": len(prepared.kept),
        "explained_variance": None if targets is None or not prepared.kept else targets.explained_variance,
        "value_mean": None if targets is None or kept is None or not kept.any() else float(targets.values[kept].mean()),
        "return_mean": None if targets is None or kept is None or not kept.any()
        else float(targets.returns[kept].mean()),
        "optimizer_steps": [*steps],
    }  # fmt: skip
