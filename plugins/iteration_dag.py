"""The DAG of a training run, made from its entry: one run of the DAG is one RL iteration.

```
wait_for_policy -> profile.<queue>... -> plan -> prepare.<queue>... -> generate.<queue>... -> infer.<queue>...
    [-> wait_for_turn] -> train.<queue>... -> commit_policy -> sync.<region>... [-> evaluate.<queue>...] -> report
```
PPO has a row for each of its tasks, in the order of the paper's graph (HetRL, section 2):
```
generate -> {reward_inference, reference_inference, critic_inference} -> {train, critic_training} -> commit_policy
```
Asynchronous PPO waits for its turn before critic_inference, whose values are of the critic that is trained next.

The gate comes first: while a failed iteration is retried, the next one is created already, and must neither measure nor
plan before its turn.
Every machine has its row per stage from the start; re-planning changes data, never the DAG. Joins run after skipped
rows (`none_failed`), so that a row without work never skips the training behind it. `plan` skips the rows that have
nothing to do, in one go, so that they never wait for a worker. The same entry gives the same serialised DAG.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, BaseOperator, TriggerRule
from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from plugins import stall_watch
from plugins.alert_callbacks import report_done, stage_failed
from plugins.assets import rollouts_asset
from plugins.policy_gate import PolicyGateOperator
from plugins.quality_dag import QUALITY_PREFIX, build_quality_dag
from plugins.rescore_dag import RESCORE_PREFIX, build_rescore_dag
from plugins.retry_policies import RETRIES, stage_retry_policy
from plugins.stage_operator import StageOperator, row_of
from plugins.timetable import IterationTimetable
from stages.contract import StageName
from stages.errors import ContractError
from stages.home import DAG_PREFIX, dag_id_of, logical_date_of
from stages.run_entry import MachineEntry, RunEntry, read_run_entry

logger = logging.getLogger(__name__)

PRIORITY = {
    StageName.TRAIN: 30, StageName.CRITIC_TRAINING: 30, StageName.COMMIT_POLICY: 30, StageName.WEIGHT_SYNC: 30,
    StageName.INFER: 20, StageName.REWARD_INFERENCE: 20, StageName.REFERENCE_INFERENCE: 20,
    StageName.CRITIC_INFERENCE: 20,
}  # fmt: skip
"""Weight by stage, absolute: what other iterations wait for goes first."""

DEFAULT_PRIORITY = 10
"""Weight of every other stage."""

MAX_ROWS_PER_MACHINE = 3
"""Most rows of a machine that may run at once in an iteration: PPO's three inference tasks."""

MIN_ACTIVE_TASKS = 16
"""Airflow's own bound on the tasks of a DAG that run at once; enough for few machines."""

PREFIXES = (DAG_PREFIX, QUALITY_PREFIX, RESCORE_PREFIX)
"""What the ids of a run's DAGs begin with, before its name."""

_DOC = """\
# Training run `{run}`

One DAG run is one RL iteration; iteration *k* has the logical date 2000-01-01T00:00Z + *k* minutes and trains policy
version
*k + 1* from version *k*. The committed data under `{root}/{run}` is the authority, not the colours of this grid.

* **Pause and go on**: pause or unpause the DAG.
* **After a failure or a crash**: `motley resume {run}`. It retries the failed iterations in order, each as a backfill
  of one iteration (clearing a failed run can deadlock with `max_active_runs`).
* **Clear a task**: the stage runs again and takes what is committed; nothing is trained twice.
"""


def build_run_dags(files: Iterable[Path], wanted: str | None = None) -> dict[str, DAG]:
    """Return the DAGs of run entries by DAG id.

    Args:
        files: Entry files, named after their runs.
        wanted: The one DAG that is needed (a task is about to run), or None for all.

    An unusable entry is logged and left out: its run stops, and `motley status` says why; raising would stop all others
    too.
    """
    dags: dict[str, DAG] = {}
    for file in files:
        if wanted is not None and wanted not in [f"{prefix}{file.stem}" for prefix in PREFIXES]:
            continue
        try:
            dags |= dags_of(read_run_entry(file), wanted)
        except ContractError:
            logger.exception("no DAG is made for %s", file)
    return dags


def dags_of(entry: RunEntry, wanted: str | None = None) -> dict[str, DAG]:
    """Return the DAGs of a run by id: training, scoring again, and the reports on its rollouts, if asked for.

    Args:
        entry: The run's entry.
        wanted: The one DAG that is needed, or None for all.
    """
    makers = {DAG_PREFIX: build_run_dag, RESCORE_PREFIX: build_rescore_dag}
    if entry.has_quality_report:
        makers[QUALITY_PREFIX] = build_quality_dag
    ids = {f"{prefix}{entry.run}": make for prefix, make in makers.items()}
    return {dag_id: make(entry) for dag_id, make in ids.items() if wanted in (None, dag_id)}


def build_run_dag(entry: RunEntry) -> DAG:
    """Return the DAG of a run."""
    is_sync = entry.lead == 0
    dag = DAG(
        dag_id=dag_id_of(entry.run),
        description=f"RL post-training run {entry.run}: {entry.iterations} iterations",
        doc_md=_DOC.format(run=entry.run, root=entry.root),
        schedule=IterationTimetable(run=entry.run, iterations=entry.iterations),
        start_date=logical_date_of(entry.first_iteration),
        catchup=True,
        is_paused_upon_creation=False,
        # The gates hold the order; this bound keeps Airflow from creating iterations that could only wait.
        max_active_runs=entry.lead + 1,
        max_active_tasks=max(MIN_ACTIVE_TASKS, MAX_ROWS_PER_MACHINE * len(entry.machines) * (entry.lead + 1)),
        # The failure pauses the DAG in its own transaction, so that no later iteration starts. Without effect in async
        # mode, where a later one runs already; there the gates hold it.
        max_consecutive_failed_dag_runs=1 if is_sync else 0,
        deadline=None if entry.stall_check_s is None else _stall_check(entry, entry.stall_check_s),
        # The DAG converts names to its enum, which is not public.
        allowed_run_types=["scheduled", "backfill"],  # type: ignore[list-item]  # text is accepted, the annotation names the enum only
        default_args={
            "owner": "motley",
            "retries": RETRIES,
            "retry_delay": timedelta(seconds=2),
            "retry_policy": stage_retry_policy(),
            "depends_on_past": False,
            "weight_rule": "absolute",
        },
        tags=["motley", "sync" if is_sync else "async"],
    )
    with dag:
        _wire(entry)
    return dag


def _stall_check(entry: RunEntry, after_s: float) -> DeadlineAlert:
    """Return the deadline that starts the watch of an iteration."""
    return DeadlineAlert(
        name="stall check",
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(seconds=after_s),
        callback=AsyncCallback(stall_watch.CALLBACK, {"run": entry.run}),
    )


def _wire(entry: RunEntry) -> None:
    rows = _Rows(entry)
    syncs, report = rows.per_region(StageName.WEIGHT_SYNC, prefix="sync"), rows.once(StageName.REPORT)
    steps: list[list[BaseOperator]] = [
        [rows.gate("wait_for_policy", max_lead=entry.lead)],
        rows.per_queue(StageName.PROFILE),
        [rows.once(StageName.PLAN)],
        rows.per_queue(StageName.PREPARE),
        rows.per_queue(StageName.GENERATE),
        *(_ppo_steps(rows) if entry.algorithm == "ppo" else _grpo_steps(rows)),
        [rows.once(StageName.COMMIT_POLICY)],
        syncs,
        rows.per_queue(StageName.EVALUATE),
        [report],
    ]
    _chain([step for step in steps if step])
    # The plan may skip every evaluation before anything else ran, and a rule looks at direct upstreams only.
    _chain([syncs, [report]])


def _grpo_steps(rows: _Rows) -> list[list[BaseOperator]]:
    """Return what stands between generation and the commit."""
    gate = [rows.gate("wait_for_turn", max_lead=0, holds="training")] if rows.entry.lead else []
    return [rows.per_queue(StageName.INFER), gate, rows.per_queue(StageName.TRAIN)]


def _ppo_steps(rows: _Rows) -> list[list[BaseOperator]]:
    """Return inference and training, whose rows run side by side."""
    inference = [*rows.per_queue(StageName.REWARD_INFERENCE), *rows.per_queue(StageName.REFERENCE_INFERENCE)]
    critic = rows.per_queue(StageName.CRITIC_INFERENCE)
    training = [*rows.per_queue(StageName.TRAIN), *rows.per_queue(StageName.CRITIC_TRAINING)]
    if not rows.entry.lead:
        return [[*inference, *critic], training]
    gate: list[BaseOperator] = [rows.gate("wait_for_turn", max_lead=0, holds="training")]
    _chain([gate, critic, training])
    return [[*inference, *gate], training]


def _chain(steps: list[list[BaseOperator]]) -> None:
    """Make every row of a step wait for all rows of the step before."""
    for upstream, downstream in pairwise(steps):
        for operator in downstream:
            operator.set_upstream(upstream)


class _Rows:
    """Makes the tasks of a run's DAG."""

    def __init__(self, entry: RunEntry) -> None:
        self.entry = entry

    def once(self, stage: StageName) -> BaseOperator:
        """Return the one row of a stage, on the control machine."""
        return self._stage(stage, stage.value, self.entry.control)

    def per_queue(self, stage: StageName) -> list[BaseOperator]:
        """Return a row for every machine."""
        return [self._stage(stage, row_of(stage, machine), machine) for machine in self.entry.machines]

    def per_region(self, stage: StageName, prefix: str) -> list[BaseOperator]:
        """Return a row for every region, on its first machine."""
        rows = []
        for region in self.entry.regions:
            here = [machine for machine in self.entry.machines if machine.region == region]
            machine = next((m for m in here if m.name not in self.entry.drained), here[0])
            rows.append(self._stage(stage, f"{prefix}.{region}", machine, {"region": region}))
        return rows

    def gate(self, task_id: str, max_lead: int, holds: str = "generation") -> BaseOperator:
        """Return a gate on the committed policy version that holds a side of the iteration."""
        entry = self.entry
        return PolicyGateOperator(
            task_id=task_id,
            run=entry.run,
            root=entry.root,
            max_lead=max_lead,
            deadline_s=entry.gate_deadline_s,
            holds=holds,
            storage_options=dict(entry.storage_options),
            on_failure_callback=stage_failed,
            trigger_rule=TriggerRule.NONE_FAILED,
            queue=entry.control.queue,
            priority_weight=DEFAULT_PRIORITY,
        )

    def _stage(
        self, stage: StageName, task_id: str, machine: MachineEntry, stage_params: dict[str, Any] | None = None
    ) -> BaseOperator:
        is_source = stage is StageName.REPORT and self.entry.has_quality_report
        return StageOperator(
            task_id=task_id,
            entry=self.entry,
            stage=stage,
            machine=machine,
            stage_params=stage_params,
            on_success_callback=report_done if stage is StageName.REPORT else None,
            outlets=[rollouts_asset(self.entry.run)] if is_source else [],
            on_failure_callback=stage_failed,
            trigger_rule=TriggerRule.NONE_FAILED,
            queue=self.entry.queue_of(machine),
            priority_weight=PRIORITY.get(stage, DEFAULT_PRIORITY),
        )
