"""Stage train: policy version k becomes k + 1.

Writes the column family `training`, the resume point k + 1 and, last, policy version k + 1, which marks the work as
done but is not authoritative until stage commit_policy. Where the plan trains on several machines, each has this stage
(`stages.gang`): all read the same rows and train together, and the first one writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.engines.canary import SAME_ENGINE_GAP, check_canary
from stages.engines.client import RemoteEngine
from stages.engines.protocol import TrainingOutcome, TrainingRequest
from stages.errors import ContractError, NumericsError, WeightMismatchError
from stages.gang import Gang, gang_of
from stages.generate import run_prompts
from stages.kl_state import KL_WEIGHT_KEY, kl_control, kl_weight_of, with_kl_weight
from stages.policy_files import checkpoint_directory, loadable_policy, policy_at_home
from stages.publish import publish_version, save_for_lead
from stages.rollout_shards import Shard, find_in_regions
from stages.staleness.ages import age_metrics
from stages.staleness.buffer import Taken
from stages.staleness.consumption import Consumption, consume
from stages.step_documents import step_document
from stages.training_columns import training_columns
from stages.training_data import data_fingerprint, families_of, joined_rows
from stages.training_rows import PreparedRows, mini_batches, prepare_rows
from stages.weights_proof import canary_of
from storage.checkpoints import load_checkpoint
from storage.documents import fingerprint
from storage.layout import checkpoint_folder, manifest_key, policy_folder
from storage.manifest import find_valid
from storage.policies import Policy, head_version
from storage.rollout_schema import Family
from storage.rollouts import write_family


def run_stage(context: StageContext) -> StageOutcome:
    """Train one iteration, or find that it was trained."""
    k = context.iteration
    policy = policy_to_train(context)
    if policy is None:
        standing = policy_at_home(context, k + 1)
        return StageOutcome(reused=True, artefacts=_keys(context), metrics=dict(standing.manifest.metadata["training"]))
    with context.phase("find_shards"):
        consumption = consume(context, families_of(context.job))
    data = data_fingerprint(context, consumption)
    inputs = fingerprint("train", policy.weights_hash, data)
    found = _standing(context, inputs)
    if found is not None:
        return StageOutcome(reused=True, artefacts=_keys(context), metrics=dict(found.manifest.metadata["training"]))
    gang = gang_of(context, RlTask.ACTOR_TRAINING, context.job.engines.training.name)
    # Fetched before others wait for this machine.
    model_dir = context.engines.base_directory
    work = _Work(
        policy=policy, consumption=consumption, data=data, inputs=inputs, model_dir=model_dir, gang=gang
    )  # fmt: skip
    if gang is None:
        return _train_version(context, work)

    def is_settled() -> bool:
        return _standing(context, inputs) is not None

    with gang.joined(inputs, is_settled) as is_formed:
        if is_formed:
            return _train_version(context, work)
    return StageOutcome(reused=True, artefacts=_keys(context))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What an attempt trains."""

    policy: Policy
    consumption: Consumption
    data: str
    """SHA-256 of the data."""
    inputs: str
    """SHA-256 of data and weights."""
    model_dir: Path
    """Directory of version 0, from which engines start."""
    gang: Gang | None
    """The stages on other machines with which this one trains."""


def _train_version(context: StageContext, work: _Work) -> StageOutcome:
    """Make version k + 1 and publish it, or in a gang help its lead to."""
    k, policy, consumption, gang = context.iteration, work.policy, work.consumption, work.gang
    is_lead = gang is None or gang.is_lead
    if is_lead:
        _discard_unfinished(context, len(consumption.rollouts) + 1)
    kl_weight = kl_weight_of(context)
    with context.phase("read"):
        prepared = prepare_rows(
            joined_rows(consumption),
            context.job,
            policy.version,
            is_withheld=consumption.is_withheld,
            kl_weight=kl_weight,
        )
    prompts = run_prompts(context)
    with context.phase("engines"):
        engine = context.engines.training(work.model_dir, None if gang is None else gang.place)
    load_version(context, engine, policy, prompts.dataset_fingerprint)
    is_warm_up = context.job.ppo is not None and k < context.job.ppo.critic_warm_up_iterations
    steps = [] if is_warm_up else mini_batches(prepared, context.job, context.run.seed, k)
    context.log("train", version=k, rows=len(prepared.kept), optimizer_steps=len(steps))
    outcome = _train(context, engine, prepared, steps, kl_weight)
    if not is_lead:
        return _help_lead(context, work, engine)
    control = kl_control(context.job, kl_weight, prepared, outcome)
    metrics = training_metrics(prepared, outcome, consumption.taken)
    metrics |= {"kl_control": control.facts()} if control is not None else {}
    metrics |= {"gang": gang.facts()} if gang is not None else {}
    with context.phase("commit"):
        _write_columns(context, consumption.rollouts, prepared, outcome, work.inputs)
    publish_version(
        context,
        engine,
        k + 1,
        dataset_fingerprint=prompts.dataset_fingerprint,
        canary_rows=canary_of(policy).rows,
        metadata={
            "training": metrics,
            "inputs": work.inputs,
            "data": work.data,
            "iteration": k,
            "attempt": context.request.attempt,
        },
        is_head=False,
        buffer=consumption.taken.after,
        trainer_state={} if control is None else {KL_WEIGHT_KEY: control.next_weight},
        when_saved=None if gang is None else gang.may_publish,
    )
    return StageOutcome(artefacts=_keys(context), metrics=metrics)


def _help_lead(context: StageContext, work: _Work, engine: RemoteEngine) -> StageOutcome:
    """Save with the lead of the gang, and wait until it has published."""
    if work.gang is None:
        raise ContractError("only a stage in a gang has a lead to help.")
    save_for_lead(context, engine, context.iteration + 1, canary_of(work.policy).rows)
    with context.phase("wait_for_lead"):
        work.gang.wait_for_lead(lambda: _standing(context, work.inputs) is not None)
    return StageOutcome(artefacts=_keys(context), metrics={"gang": work.gang.facts()})


def policy_to_train(context: StageContext) -> Policy | None:
    """Return policy version k, or None when version k + 1 is already authoritative.

    Raises:
        ContractError: version k is not authoritative yet: an earlier iteration is missing.
    """
    k = context.iteration
    head = head_version(context.home, context.run.name)
    if head is not None and head > k:
        return None
    if head != k:
        raise ContractError(
            f"run {context.run.name}: iteration {k} trains policy version {k}, but the newest committed version is "
            f"{head}; training is serial, finish the earlier iterations first."
        )
    return policy_at_home(context, k)


def load_version(context: StageContext, engine: RemoteEngine, policy: Policy, dataset_fingerprint: str) -> None:
    """Bring the training engine to a policy version and its resume point, unless it proves that it is there.

    Raises:
        ResumeMismatchError: the resume point belongs to another job or dataset.
        WeightMismatchError: the loaded weights are not those of the policy.
    """
    record = canary_of(policy)
    info = engine.info()
    if info.policy_version == policy.version:
        with context.phase("canary"):
            try:
                check_canary(
                    record, engine.score(record.rows), max_gap=SAME_ENGINE_GAP, engine=engine.record.describe()
                )
            except WeightMismatchError:
                context.log("the engine is at another point than its version says", version=policy.version)
            else:
                return
    with context.phase("load_checkpoint"):
        checkpoint = load_checkpoint(
            context.home,
            context.run.name,
            policy.version,
            config_hash=context.job.fingerprint,
            dataset_fingerprint=dataset_fingerprint,
        )
        context.log("load", role="training", version=policy.version)
        files = loadable_policy(context, policy)
        engine.load_checkpoint(
            files.directory, checkpoint_directory(context, checkpoint), policy.version, policy.weights_hash, files.base
        )
        try:
            gap = context.job.canary_max_gap
            check_canary(record, engine.score(record.rows), max_gap=gap, engine=engine.record.describe())
        except WeightMismatchError:
            context.engines.discard(engine)
            raise


def _standing(context: StageContext, inputs: str) -> Policy | None:
    """Return policy version k + 1 if an earlier attempt at the same inputs finished it."""
    run, version = context.run.name, context.iteration + 1
    for folder in (policy_folder(run, version), checkpoint_folder(run, version)):
        if find_valid(context.home, folder) is None:
            return None
    policy = policy_at_home(context, version)
    return policy if policy.manifest.metadata.get("inputs") == inputs else None


def _discard_unfinished(context: StageContext, num_shards: int) -> None:
    """Unpublish what an attempt that died left beyond the head; nobody can have relied on it."""
    run, version = context.run.name, context.iteration + 1
    keys = [manifest_key(policy_folder(run, version)), manifest_key(checkpoint_folder(run, version))]
    for key in keys:
        if context.home.delete(key):
            context.log("discard", key=key)
    for shard in range(num_shards):
        found = _training_shard(context, shard)
        if found is not None:
            found.store.delete(found.manifest.key)


def _training_shard(context: StageContext, shard: int) -> Shard | None:
    return find_in_regions(context, context.iteration, shard, Family.TRAINING)


def _train(
    context: StageContext,
    engine: RemoteEngine,
    prepared: PreparedRows,
    steps: Sequence[Sequence[int]],
    kl_weight: float,
) -> TrainingOutcome | None:
    """Make the optimizer steps; None when no row has a signal and so none is made."""
    if not steps:
        return None
    job = context.job
    request = TrainingRequest(
        rows=prepared.training_rows(),
        mini_batches=steps,
        grpo=with_kl_weight(job.grpo, kl_weight),
        correction=job.correction,
        optimizer=job.optimizer,
        total_optimizer_steps=job.iterations * job.optimizer_steps_per_iteration,
        micro_batch_tokens=job.planner.training.micro_batch_size * job.planner.lengths.total,
        max_non_finite_steps=job.limits.non_finite_steps,
        max_response_tokens=job.planner.lengths.response,
    )
    try:
        with context.phase("train"):
            outcome = engine.train(request)
    except NumericsError as error:
        path = _dump(context, prepared, error.attributes.get("row_ids", ()))
        raise NumericsError(f"{error}; the rows are in {path}", **{**error.attributes, "dump": str(path)}) from error
    if outcome.skipped_row_ids:
        path = _dump(context, prepared, outcome.skipped_row_ids)
        context.log("skipped optimizer steps", rows=len(outcome.skipped_row_ids), dump=path)
    return outcome


def _dump(context: StageContext, prepared: PreparedRows, row_ids: Sequence[str]) -> Path:
    wanted = set(row_ids)
    folder = context.state_dir / "dumps" / context.run.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"non-finite-{context.iteration}-{context.request.attempt}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for place, row in enumerate(prepared.rows):
            if row["row_id"] in wanted:
                file.write(json.dumps({**row, "advantage": prepared.advantage(place)}) + "\n")
    return path


def training_metrics(prepared: PreparedRows, outcome: TrainingOutcome | None, taken: Taken) -> dict[str, JsonValue]:
    """Return counts, the ages of rows and the metrics of every optimizer step."""
    steps = [] if outcome is None else [step_document(step) for step in outcome.steps]
    counts: dict[str, JsonValue] = {**prepared.counts(), **taken.counts()}
    return {"counts": counts, "staleness": age_metrics(prepared), "optimizer_steps": [*steps]}


def _write_columns(
    context: StageContext,
    rollouts: Sequence[Shard],
    prepared: PreparedRows,
    outcome: TrainingOutcome | None,
    inputs: str,
) -> None:
    """Write what became of the rows: beside the rollouts of the iteration, and in one shard more for earlier ones."""
    columns = training_columns(prepared, outcome, context.job.correction, context.iteration)
    parts = [
        [columns.pop(row["row_id"]) for row in shard.rows(Family.ROLLOUTS, ("row_id",)) if row["row_id"] in columns]
        for shard in rollouts
    ]
    if columns:
        parts.append([*columns.values()])
    for index, part in enumerate(parts):
        store = rollouts[index].store if index < len(rollouts) else context.home
        write_family(
            store, context.run.name, context.iteration, Family.TRAINING, index, len(parts), part,
            input_fingerprint=fingerprint("training", inputs, index),
            created_by=context.created_by, attempt=context.request.attempt,
            metadata={"is_partial": context.job.asynchrony.spare_prompts > 0},
        )  # fmt: skip


def _keys(context: StageContext) -> tuple[str, ...]:
    run, version = context.run.name, context.iteration + 1
    return (manifest_key(policy_folder(run, version)), manifest_key(checkpoint_folder(run, version)))
