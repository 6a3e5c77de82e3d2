"""Stage report: the record of an iteration, from committed data and from the results of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from plans.plan import Plan
from stages.alarm_names import KINDS_FIELD
from stages.alarms import Alarm, disk_alarms, drift_alarms, drifts_of, non_finite_alarms, trouble_alarms
from stages.context import StageContext, StageOutcome
from stages.critic_versions import critic_at_home
from stages.errors import ContractError
from stages.evaluations import stored_evaluation
from stages.policy_files import policy_at_home
from stages.rollout_shards import Shard, all_shards
from stages.rollout_statistics import rollout_metrics, troubles_of
from stages.sharding import shard_ranges
from stages.stage_times import StageTimes, read_results, results_elsewhere, stage_times, waits_between
from stages.staleness.balance import drift, measured_balance, predicted_balance, who_waits
from stages.staleness.drift_watch import DRIFT_METRIC
from stages.tensorboard_export import write_scalars
from storage import layout
from storage.errors import ObjectMissingError
from storage.metrics import export_metrics
from storage.policies import Policy, head_version
from storage.rollout_schema import Family
from storage.runs import IterationRecord, read_iteration, write_iteration

_COLUMNS: Final[Mapping[Family, Sequence[str]]] = {
    Family.ROLLOUTS: ("row_id", "completion_token_ids", "finish_reason"),
    Family.REWARD: ("row_id", "reward", "reward_status"),
    Family.TRAINING: (
        "row_id", "is_dropped", "dropped_reason", "staleness", "logprob_gap_max", "importance_weight_mean",
        "importance_weight_max",
    ),
}  # fmt: skip

#: Predicted phases of a plan by the stage that they are of.
_PREDICTED: Final = {
    "generation_s": "generate", "inference_s": "infer", "training_s": "train", "transfer_s": "weight_sync",
}  # fmt: skip

#: Predicted tasks of a PPO plan by the stage that does them.
_PREDICTED_TASKS: Final = {
    "reward_inference": "reward_inference", "reference_inference": "reference_inference",
    "critic_inference": "critic_inference", "actor_training": "train", "critic_training": "critic_training",
}  # fmt: skip


def run_stage(context: StageContext) -> StageOutcome:
    """Write the record of an iteration that is committed, and the run's metrics."""
    run, k, home = context.run.name, context.iteration, context.home
    head = head_version(home, run)
    if head is None or head < k + 1:
        raise ContractError(
            f"run {run}: iteration {k} is reported after version {k + 1} is committed, but the newest committed "
            f"version is {head}; run stage commit_policy first."
        )
    record = find_record(context, k)
    is_reused = record is not None
    if record is None:
        with context.phase("read"):
            record = build_record(context)
        with context.phase("commit"):
            write_iteration(home, record)
    with context.phase("metrics"):
        manifest = export_metrics(home, run, created_by=context.created_by)
        if context.job.metrics.tensorboard:
            write_scalars(context.state_dir / "tensorboard" / run, k, _scalars(record))
    return StageOutcome(
        reused=is_reused,
        artefacts=(layout.iteration_record(run, k), manifest.key),
        metrics={
            "reward_mean": record.metrics.get("reward_mean"),
            "eval_reward_mean": record.metrics.get("eval_reward_mean"),
            "overhead_fraction": record.metrics.get("overhead_fraction"),
            "alarms": [*record.alarms],
        },
    )


def find_record(context: StageContext, iteration: int) -> IterationRecord | None:
    """Return an iteration's record, None if it was not reported."""
    try:
        return read_iteration(context.home, context.run.name, iteration)
    except ObjectMissingError:
        return None


def build_record(context: StageContext) -> IterationRecord:
    """Return the record of an iteration."""
    k = context.iteration
    policy = policy_at_home(context, k + 1)
    training: Mapping[str, Any] = policy.manifest.metadata["training"]
    shards = _shards(context)
    rows, consumed = _joined(shards)
    metrics, counts = rollout_metrics(rows, consumed)
    counts = {**training["counts"], **counts}
    here = read_results(context.state_dir, context.run.name, k)
    times = stage_times([*here, *results_elsewhere(context.request)])
    troubles = troubles_of(
        rows, counts["groups"], counts["groups_zero_variance"], training["counts"]["groups_in_batch"]
    )
    metrics |= _optimizer_metrics(training["optimizer_steps"])
    metrics |= _evaluation_metrics(context, k) | _kl_metrics(training)
    metrics |= _lag_metrics(context, training, times)
    balance, balance_metrics = _balance(context, counts["rows"], times)
    metrics |= balance_metrics
    critic_steps: Sequence[Mapping[str, Any]] = ()
    if context.job.ppo is not None:
        learned = critic_at_home(context, k + 1).manifest.metadata["training"]
        critic_steps = learned["optimizer_steps"]
        metrics |= _critic_metrics(learned)
    metrics["tokens_per_s"] = _sampling_rate(shards[Family.ROLLOUTS], counts["tokens"])
    waits = waits_between(stage_times(read_results(context.state_dir, context.run.name, k - 1)), times)
    metrics["overhead_fraction"] = times.overhead_fraction(waits.turn_s or 0.0)
    metrics |= {
        "turn_wait_s": waits.turn_s,
        "generation_idle_s": waits.generation_idle_s,
        "training_idle_s": waits.training_idle_s,
    }
    metrics["zero_variance_fraction"] = counts["groups_zero_variance"] / max(1, counts["groups"])
    alarms = _alarms(context, troubles, [*training["optimizer_steps"], *critic_steps], metrics[DRIFT_METRIC])
    return IterationRecord(
        run=context.run.name,
        iteration=k,
        plan=context.plan_number,
        policy_version_start=k,
        policy_version_end=k + 1,
        started_at=_moment(times.started_at),
        ended_at=_moment(times.ended_at),
        measured_s=dict(times.measured_s),
        predicted_s=_predicted(context),
        counts=counts,
        metrics=metrics,
        optimizer_steps=[_numbers(step) for step in training["optimizer_steps"]],
        alarms=[alarm.sentence for alarm in alarms],
        metadata={
            **_metadata(context, policy, training, shards, times, troubles),
            "balance": balance,
            KINDS_FIELD: [alarm.kind for alarm in alarms],
        },
    )


def _metadata(
    context: StageContext,
    policy: Policy,
    training: Mapping[str, Any],
    shards: Mapping[Family, Sequence[Shard]],
    times: StageTimes,
    troubles: Sequence[str],
) -> dict[str, Any]:
    rollouts = [shard.manifest for shard in shards[Family.ROLLOUTS]]
    is_invariant = all(manifest.metadata.get("is_batch_invariant") for manifest in rollouts)
    return {
        "phases_s": {stage: dict(phases) for stage, phases in times.phases_s.items()},
        "gaps_s": dict(times.gaps_s),
        "missing": list(times.missing),
        "troubles": list(troubles),
        "weights_hash": policy.weights_hash,
        "placement": context.plan.fingerprint,
        "planner": _planner(context.plan),
        "sampling_versions": sorted({version for manifest in rollouts for version in manifest.policy_versions}),
        "max_staleness": context.job.max_staleness,
        "generate_ahead": context.job.generate_ahead,
        "lag_histogram": dict(training["staleness"]["histogram"]),
        "withheld_lag_histogram": dict(training["staleness"]["withheld_histogram"]),
        "correction": context.job.correction.model_dump(mode="json"),
        "reproducible": "bitwise in fp32, for every placement and retry" if is_invariant else "committed shards only",
    }


def _planner(plan: Plan) -> dict[str, Any]:
    """Return how the plan in force was found."""
    extra = plan.search.model_extra or {}
    facts = {name: extra.get(name) for name in ("budget", "model", "limits", "drained")}
    return {"method": plan.method, "seed": plan.search.seed, "evaluations": plan.search.evaluations, **facts}


def _shards(context: StageContext) -> dict[Family, list[Shard]]:
    job = context.job
    num_shards = len(shard_ranges(job.prompts_per_iteration, job.prompts_per_shard))
    found = {family: all_shards(context, context.iteration, num_shards, family) for family in _COLUMNS}
    # Rows that waited in the buffer have their training columns in a shard more.
    if int(found[Family.TRAINING][0].manifest.metadata["num_shards"]) > num_shards:
        found[Family.TRAINING] = all_shards(context, context.iteration, num_shards + 1, Family.TRAINING)
    return found


def _joined(shards: Mapping[Family, Sequence[Shard]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows that the iteration sampled, and the training columns of those that it decided on."""
    rows: dict[str, dict[str, Any]] = {}
    consumed: list[dict[str, Any]] = []
    for family, group in shards.items():
        for shard in group:
            for row in shard.rows(family, _COLUMNS[family]):
                if family is Family.TRAINING:
                    consumed.append(row)
                if family is Family.ROLLOUTS or row["row_id"] in rows:
                    rows.setdefault(row["row_id"], {}).update(row)
    return list(rows.values()), consumed


def _lag_metrics(context: StageContext, training: Mapping[str, Any], times: StageTimes) -> dict[str, float | None]:
    """Return the ages of what was trained on, and how long a committed version took to reach the engines."""
    ages, counts = training["staleness"], training["counts"]
    decided = counts["groups_trained_total"] + counts["groups_withheld_total"]
    return {
        "lag_mean": ages["mean"],
        "lag_max": ages["max"],
        "lag_limit": float(context.job.max_staleness),
        "discard_fraction": ages["discard_fraction"],
        "discard_fraction_total": counts["groups_withheld_total"] / max(1, decided),
        "publish_lag_s": times.publish_lag_s,
    }


def _balance(context: StageContext, samples: int, times: StageTimes) -> tuple[str | None, dict[str, float | None]]:
    """Return who waits for whom, and the rates of both sides, measured and promised."""
    phases = context.plan.predicted.get("phases")
    measured = measured_balance(samples, times.measured_s)
    seconds = phases if isinstance(phases, dict) else {}
    promised = predicted_balance(
        samples, {name: float(value) for name, value in seconds.items() if isinstance(value, int | float)}
    )
    metrics: dict[str, float | None] = {DRIFT_METRIC: None}
    for name, balance in (("", measured), ("predicted_", promised)):
        metrics[f"{name}producer_samples_per_s"] = None if balance is None else balance.producer_samples_per_s
        metrics[f"{name}consumer_samples_per_s"] = None if balance is None else balance.consumer_samples_per_s
    if measured is not None and promised is not None:
        metrics[DRIFT_METRIC] = drift(measured, promised)
    return None if measured is None else who_waits(measured), metrics


def _sampling_rate(rollouts: Sequence[Shard], tokens: int) -> float | None:
    """Return sampled tokens per second, from the start of the first engine call to the end of the last one."""
    starts = [shard.manifest.metadata.get("started_at") for shard in rollouts]
    ends = [shard.manifest.metadata.get("ended_at") for shard in rollouts]
    if None in starts or None in ends:
        return None
    seconds = max(float(str(end)) for end in ends) - min(float(str(start)) for start in starts)
    return tokens / seconds if seconds > 0 else None


def _optimizer_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean of every metric over the optimizer steps that were made."""
    made = [step for step in steps if not step["is_skipped"]]
    names = sorted({name for step in made for name in step} - {"optimizer_step", "is_skipped"})
    values = {name: [step[name] for step in made if step.get(name) is not None] for name in names}
    means: dict[str, float | None] = {
        name: sum(found) / len(found) if found else None for name, found in values.items()
    }
    skipped = float(len(steps) - len(made))
    return {**means, "optimizer_steps_made": float(len(made)), "optimizer_steps_skipped": skipped}


def _critic_metrics(learned: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the critic's metrics: means over its optimizer steps, and how well it had explained the returns before."""
    steps = {f"critic_{name}": value for name, value in _optimizer_metrics(learned["optimizer_steps"]).items()}
    return {
        **steps,
        "value_loss": steps.get("critic_value_loss"),
        "explained_variance": learned["explained_variance"],
    }


def _kl_metrics(training: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in training.get("kl_control", {}).items() if name != "next_kl_weight"}


def _evaluation_metrics(context: StageContext, iteration: int) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {}
    after = stored_evaluation(context, iteration + 1)
    if after is not None:
        metrics["eval_reward_mean"] = after["score"]
    first = context.run.first_iteration
    before = stored_evaluation(context, first) if iteration == first else None
    if before is not None:
        metrics["eval_reward_mean_before"] = before["score"]
    return metrics


def _predicted(context: StageContext) -> dict[str, float]:
    phases, tasks = context.plan.predicted.get("phases"), context.plan.predicted.get("tasks")
    if not isinstance(phases, dict) or not isinstance(tasks, dict):
        return {}
    predicted = {
        stage: float(value) for name, stage in _PREDICTED.items() if isinstance(value := phases.get(name), int | float)
    }
    if context.job.ppo is not None:  # a stage for each task
        predicted.pop("infer", None)
        for task, stage in _PREDICTED_TASKS.items():
            cost = tasks.get(task)
            if isinstance(cost, dict) and isinstance(total := cost.get("total_s"), int | float):
                predicted[stage] = float(total)
    return predicted


def _alarms(
    context: StageContext, troubles: Sequence[str], steps: Sequence[Mapping[str, Any]], drift_now: float | None
) -> list[Alarm]:
    limits, replan = context.job.limits, context.job.replan
    num = max(limits.alarm_iterations, replan.confirm)
    before = [find_record(context, k) for k in range(max(0, context.iteration - num + 1), context.iteration)]
    history = [[] if record is None else record.metadata.get("troubles", []) for record in before]
    alarms = trouble_alarms([*history, troubles], limits.alarm_iterations) + non_finite_alarms(steps)
    if context.job.generate_ahead:  # else one side waits for the other by design
        alarms += drift_alarms(drifts_of(before, drift_now), limit=replan.drift, confirm=replan.confirm)
    folders = {"the machine's state": context.state_dir}
    if (local := context.home.local_path(layout.run_folder(context.run.name))) is not None:
        folders["the object store"] = local
    return alarms + disk_alarms(folders)


def _numbers(step: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: None if value is None else float(value) for name, value in step.items()}


def _scalars(record: IterationRecord) -> dict[str, float]:
    timed = {f"measured_s/{name}": value for name, value in record.measured_s.items()}
    return {**{name: value for name, value in record.metrics.items() if value is not None}, **timed}


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
