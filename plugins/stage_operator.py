"""The operator of every stage: it starts a detached stage process, follows it and takes over its outcome.

The process outlives the task: after the death of a worker, the scheduler or the whole deployment the next try finds it
by its job folder and re-attaches. What was done is decided by the committed data, never by a finished task: a cleared
task or another try starts the stage again, which finds its artefacts and reports `reused`.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped
from pydantic import JsonValue

from plugins.assets import partition_of
from plugins.log_tail import LogTail
from plugins.stage_failures import error_of
from plugins.store_connections import store_environment, store_options
from stages.contract import StageName, StageRequest, StageResult, StageStatus
from stages.errors import ContractError, DeadlineError, EngineUnavailableError
from stages.home import ENGINES_PYTHON_VARIABLE, MotleyHome, iteration_of
from stages.launch import StageAttempt, StageJob, stage_environment
from stages.run_entry import MachineEntry, RunEntry
from stages.stage_times import RESULTS_PARAM
from storage.store import open_store

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

POLL_INTERVAL_S = 0.05
"""Seconds between two looks at the process, its result and its log."""

DEADLINE_MARGIN_S = 30.0
"""Seconds beyond its own deadline in which a process may still say that it passed it."""

PLAN_TASK_ID = "plan"
"""Task whose XCom may say under `queues` which queues have work, by stage."""

PLANNED_STAGES = (
    StageName.PREPARE, StageName.GENERATE, StageName.INFER, StageName.REWARD_INFERENCE, StageName.REFERENCE_INFERENCE,
    StageName.CRITIC_INFERENCE, StageName.TRAIN, StageName.CRITIC_TRAINING, StageName.EVALUATE,
)  # fmt: skip
"""Stages with a row per queue of which the plan decides which ones have work."""


def row_of(stage: StageName, machine: MachineEntry) -> str:
    """Return the task id of a machine's row of a stage."""
    return f"{stage.value}.{machine.queue}"


class StageOperator(BaseOperator):
    """Runs one stage of the iteration on one machine."""

    ui_color = "#dcebf7"

    def __init__(
        self,
        *,
        entry: RunEntry,
        stage: StageName,
        machine: MachineEntry,
        stage_params: dict[str, JsonValue] | None = None,
        **kwargs: Any,  # noqa: ANN401 - BaseOperator's own arguments
    ) -> None:
        """Keep the arguments.

        Args:
            entry: The run's entry.
            stage: Stage to run.
            machine: Machine on which it runs; its name, queue and region.
            stage_params: Stage-specific settings of the request.
            **kwargs: Arguments of `BaseOperator`. The task id is the row: it tells the queues of a stage apart.
        """
        super().__init__(**kwargs)
        self.entry = entry
        self.stage = stage
        self.machine = machine
        self.stage_params = dict(stage_params or {})
        self._job: StageJob | None = None
        self._attempt: StageAttempt | None = None
        self._token = ""
        self._done: tuple[int, list[str]] | None = None

    def execute(self, context: Context) -> dict[str, JsonValue]:
        """Run the stage, or find the process that runs it, and return references to what it committed.

        Raises:
            StageError, StorageError, PlanningError: what the stage process raised.
            EngineUnavailableError: the process ended without a result.
            DeadlineError: the process did not end in time.
        """
        iteration = iteration_of(context["dag_run"].logical_date)
        if reason := self.reason_to_skip(iteration, context):
            raise AirflowSkipException(reason)
        request = self.request(iteration, context)
        self._job = StageJob.of(request, self.task_id)
        self._token = uuid.uuid4().hex
        self._attempt, is_new = self._job.attach_or_start(
            request,
            command=[self._interpreter()],
            environment={**stage_environment(os.environ), **store_environment(self.entry, os.environ)},
            starter={
                "dag_run": str(context["run_id"]),
                "clear_number": context["dag_run"].clear_number or 0,
                "try_number": context["ti"].try_number,
            },
        )
        self._job.own(self._token)
        self.log.info(
            "%s %s (pid %s)", "started" if is_new else "re-attached to", self._attempt.folder, self._attempt.pid()
        )
        result = self._follow(self._attempt)
        self._check(result, request)
        if result.error is not None:
            raise error_of(result.error)
        self._done = (iteration, list(result.artefacts))
        references = _references(result)
        if self.stage is StageName.PLAN and (idle := self.idle_rows(iteration, references.get("queues"))):
            context["ti"].xcom_push(key=BaseXCom.XCOM_RETURN_KEY, value=references)
            raise DownstreamTasksSkipped(tasks=idle)  # type: ignore[no-untyped-call]  # has no annotations
        for asset in self.outlets:
            context["outlet_events"][asset].add_partitions(partition_of(iteration))
        return references

    def get_openlineage_facets_on_complete(self, _: Any) -> OperatorLineage | None:  # noqa: ANN401 - task instance
        """Return the datasets that the stage read and made; asked by Airflow's OpenLineage provider, if it is there."""
        from plugins.lineage import stage_lineage

        if self._done is None:  # skipped, or failed
            return None
        region = self.machine.region
        store = open_store(self.entry.roots[region], **store_options(self.entry, region))
        return stage_lineage(store, self.entry.run, self.stage, *self._done)

    def idle_rows(self, iteration: int, queues: JsonValue) -> list[str]:
        """Return the rows behind the plan that have nothing to do in an iteration."""
        idle = [
            row_of(stage, machine)
            for stage in PLANNED_STAGES
            for machine in self.entry.machines
            if _reason_to_idle(self.entry, stage, machine, iteration, queues) is not None
        ]
        return self._existing(idle)

    def _existing(self, rows: list[str]) -> list[str]:
        """Return the rows that the DAG has: GRPO and PPO have different ones."""
        is_in_dag = self.has_dag()  # type: ignore[no-untyped-call]  # has no annotations
        return [row for row in rows if not is_in_dag or row in self.dag.task_ids]

    def reason_to_skip(self, iteration: int, context: Context) -> str | None:
        """Return why this row has nothing to do in an iteration, or None; looks at the entry and the plan task only."""
        if self.machine.name in self.entry.drained:
            return f"machine {self.machine.name} is drained"
        if self.stage is StageName.PROFILE and not self.entry.is_profile_due(iteration):
            return "no measurement is due in this iteration"
        if self.stage not in PLANNED_STAGES:
            return None
        plan = context["ti"].xcom_pull(task_ids=PLAN_TASK_ID) if len(self.entry.machines) > 1 else None
        queues = plan.get("queues") if isinstance(plan, dict) else None
        return _reason_to_idle(self.entry, self.stage, self.machine, iteration, queues)

    def request(self, iteration: int, context: Context | None = None) -> StageRequest:
        """Return the request of an iteration; the report is told what the rows of other machines measured."""
        home = MotleyHome.from_environment(os.environ)
        params = self.stage_params
        if self.stage is StageName.REPORT and context is not None and len(self.entry.machines) > 1:
            params = {**params, RESULTS_PARAM: self._results_elsewhere(context)}
        return StageRequest(
            stage=self.stage,
            run=self.entry.run,
            iteration=iteration,
            root=self.entry.roots[self.machine.region],
            machine=self.machine.name,
            state_dir=str(home.state_dir(self.machine.name)),
            attempt="unnamed",
            deadline_s=self.entry.stage_deadline_s,
            params=params,
        )

    def _results_elsewhere(self, context: Context) -> list[JsonValue]:
        """Return the times of rows that ran on other machines than the control machine, whose job folders lie there."""
        entry = self.entry
        rows = [row_of(stage, machine) for stage in PLANNED_STAGES for machine in entry.machines[1:]]
        rows += [f"sync.{region}" for region in entry.regions if region != entry.control.region]
        found = [context["ti"].xcom_pull(task_ids=row) for row in self._existing(rows)]
        return [value["times"] for value in found if isinstance(value, dict) and "times" in value]

    def on_kill(self) -> None:
        """End the stage process, unless a later try has taken it over already."""
        if self._job is None or self._attempt is None:
            return
        if not self._job.is_owned_by(self._token):
            self.log.warning("another try follows %s now; it is left alone", self._attempt.folder)
            return
        self.log.warning("ending stage process %s", self._attempt.pid())
        self._attempt.end()

    def _interpreter(self) -> str:
        return os.environ.get(ENGINES_PYTHON_VARIABLE) or sys.executable

    def _follow(self, attempt: StageAttempt) -> StageResult:
        tail, started_at = LogTail(attempt.log_file), attempt.started_at()
        while True:
            is_alive = attempt.is_alive()  # before the result is looked for: a last result can't be missed
            for line in tail.new_lines():
                self.log.info("%s", line)
            if (result := attempt.result()) is not None or not is_alive:
                break
            if time.time() > started_at + self.entry.stage_deadline_s + DEADLINE_MARGIN_S:
                attempt.end()
                raise DeadlineError(
                    f"stage {self.stage} did not end within {self.entry.stage_deadline_s:g} s and was ended; "
                    f"see {attempt.log_file}",
                    log=str(attempt.log_file),
                )
            time.sleep(POLL_INTERVAL_S)
        for line in tail.remaining_lines():
            self.log.info("%s", line)
        if result is None:
            raise EngineUnavailableError(
                f"stage process {attempt.pid()} of {self.task_id} {attempt.exit_status()} and left no result; its "
                "log is "
                f"{attempt.log_file}; another try starts it again and keeps what was committed",
                log=str(attempt.log_file),
            )
        return result

    def _check(self, result: StageResult, request: StageRequest) -> None:
        if result.fingerprint != request.fingerprint():
            raise ContractError(
                f"the result of {self.task_id} answers another request (fingerprint {result.fingerprint[:16]}, "
                "asked was "
                f"{request.fingerprint()[:16]}); the engines' interpreter may have another version of Motley than "
                "Airflow's"
            )
        if (result.status is StageStatus.FAILED) is not (result.error is not None):
            raise ContractError(f"the result of {self.task_id} says {result.status} but its error is {result.error!r}")


def _references(result: StageResult) -> dict[str, JsonValue]:
    """Return what goes through XCom: references, and of the plan the queues that have work."""
    references: dict[str, JsonValue] = {"artefacts": list(result.artefacts), "reused": result.reused}
    if "queues" in result.metrics:
        references["queues"] = result.metrics["queues"]
    times = result.model_copy(update={"metrics": {}, "artefacts": []})
    return {**references, "times": times.model_dump(mode="json", exclude_defaults=True)}


def _reason_to_idle(
    entry: RunEntry, stage: StageName, machine: MachineEntry, iteration: int, queues: JsonValue
) -> str | None:
    """Return why a planned row has nothing to do, or None."""
    if stage is StageName.PREPARE and iteration > 0:
        return "the initial policy is prepared in iteration 0"
    if stage is StageName.EVALUATE and not entry.is_evaluation_due(iteration):
        return "no evaluation is due in this iteration"
    if machine.name in entry.drained:
        return f"machine {machine.name} is drained"
    wanted = queues.get(stage.value) if isinstance(queues, dict) else None
    if isinstance(wanted, list) and machine.queue not in wanted:
        return f"the plan of iteration {iteration} gives queue {machine.queue} nothing to {stage.value}"
    return None
