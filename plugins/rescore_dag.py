"""The DAG `motley_rescore__<run>`: scores iterations of a run again with another reward, when somebody triggers it.

It has no schedule, one task on the run's control machine, and a form. What the run was trained on stays as it is; the
scores are what `motley rollouts rescore --name` makes, and a second DAG run with the same form makes the same files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from airflow.sdk import DAG, BaseOperator, Context, Param
from pydantic import JsonValue, ValidationError

from plugins.retry_policies import RETRIES, stage_retry_policy
from plugins.store_connections import store_environment
from stages.errors import ContractError
from stages.home import ENGINES_PYTHON_VARIABLE
from stages.launch import stage_environment
from stages.rescore_process import RescoreProcess, RescoreRequest
from stages.rewards.registry import REWARDS
from stages.run_entry import RunEntry
from storage.layout import Split, rescored_folder

RESCORE_PREFIX: Final = "motley_rescore__"
"""Prefix of the DAG ids; no run's DAG can have it."""

_DOC: Final = """\
# Scores of `{run}` by another reward

Trigger it and fill in the form: which iterations, which reward, and a name for the new scores. The answers that the run
committed are scored again; the run itself, and what it was trained on, stay as they are. The scores lie in
`{root}/{run}/rescored/<name>/<split>/run={run}/iteration=<k>/rescored.parquet`, with the reward of then
(`reward_before`) beside the new one. Iterations that are not done are refused. A name stands for one reward: the same
form again makes the same files.
"""


class RescoreOperator(BaseOperator):
    """Scores the iterations that the form asks for."""

    ui_color = "#f0e4d8"

    def __init__(self, *, entry: RunEntry, **kwargs: Any) -> None:  # noqa: ANN401 - BaseOperator's own arguments
        """Keep the arguments.

        Args:
            entry: The run's entry.
            **kwargs: Arguments of `BaseOperator`.
        """
        super().__init__(**kwargs)
        self.entry = entry
        self._process: RescoreProcess | None = None

    def execute(self, context: Context) -> dict[str, JsonValue]:
        """Score; return where the scores lie, and how many iterations and rows have changed scores.

        Raises:
            ContractError: the form asks for what can't be done: iterations that are not done, an unknown reward, a name
                that other rewards have; the message says which.
            StageError: scoring failed.
        """
        request = request_of(self.entry, context["params"])
        environment = {**stage_environment(os.environ), **store_environment(self.entry, os.environ)}
        python = os.environ.get(ENGINES_PYTHON_VARIABLE) or sys.executable
        done = []
        with RescoreProcess(python, request, environment) as self._process:
            for one in self._process.results():
                self.log.info(
                    "iteration %d: %d rows, mean reward %s, was %s, %s rows changed",
                    one["iteration"], one["rows"], one["after"], one["before"], one["changed"],
                )  # fmt: skip
                done.append(one)
        folder = rescored_folder(self.entry.run, str(request.name), request.split)
        self.log.info("written: %s/%s", self.entry.root, folder)
        return {
            "folder": folder,
            "iterations": len(done),
            "rows": sum(one["rows"] for one in done),
            "changed": sum(one["changed"] or 0 for one in done),
        }

    def on_kill(self) -> None:
        """End the process; what was scored stays, and another try makes the same files."""
        if self._process is not None:
            self._process.end()


def request_of(entry: RunEntry, form: Mapping[str, Any]) -> RescoreRequest:
    """Return the request that a form asks for.

    Raises:
        ContractError: the form contradicts itself.
    """
    asked = {name: form[name] for name in ("name", "split", "first", "last")}
    rewards = form["rewards"]
    if (rewards is None) is (form["reward"] is None):
        raise ContractError(
            "the form names no reward, or one and several: fill in `reward` (with its `options`), or leave it empty "
            "and fill in `rewards`"
        )
    if rewards is None:
        rewards = {"terms": [{"name": form["reward"], "options": form["options"]}]}
    elif form["options"]:
        raise ContractError(
            "the form has `options`, but they belong to `reward`, which is empty; put them into `rewards`"
        )
    try:
        return RescoreRequest(root=entry.root, run=entry.run, rewards=rewards, **asked)
    except ValidationError as error:
        faults = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise ContractError(f"the form can't be used: {faults}") from error


def build_rescore_dag(entry: RunEntry) -> DAG:
    """Return the DAG that scores a run again."""
    dag = DAG(
        dag_id=f"{RESCORE_PREFIX}{entry.run}",
        description=f"Scores of run {entry.run} by another reward",
        doc_md=_DOC.format(run=entry.run, root=entry.root),
        schedule=None,
        catchup=False,
        is_paused_upon_creation=False,
        max_active_runs=1,
        params=_form(entry),
        default_args={
            "owner": "motley", "retries": RETRIES, "retry_delay": timedelta(seconds=2),
            "retry_policy": stage_retry_policy(), "weight_rule": "absolute",
        },
        tags=["motley", "rescore"],
    )  # fmt: skip
    with dag:
        # Behind everything that trains.
        RescoreOperator(task_id="rescore", entry=entry, queue=entry.control.queue, priority_weight=1)
    return dag


def _form(entry: RunEntry) -> dict[str, Any]:
    """Return the fields of the form that the DAG is triggered with."""
    return {
        "name": Param(
            type="string", pattern="^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$", title="Name of the new scores",
            description="The folder in which they lie; a name stands for one reward.",
        ),
        "first": Param(entry.first_iteration, type="integer", minimum=0, title="First iteration"),
        "last": Param(
            None, type=["null", "integer"], minimum=0, title="Last iteration", description="Empty: the newest one."
        ),
        "split": Param(
            Split.TRAIN.value, type="string", enum=[split.value for split in Split], title="Split",
            description="What was trained on, or evaluations (iterations are policy versions then).",
        ),
        "reward": Param(
            None, type=["null", "string"], enum=[None, *sorted(REWARDS)], title="Reward",
            description="Empty: what `rewards` says.",
        ),
        "options": Param({}, type="object", title="Options of the reward", description="As in a job file."),
        "rewards": Param(
            None, type=["null", "object"], title="Several rewards", section="In place of one reward",
            description="Section `rewards` of a job file: terms with their weights, and limits.",
        ),
    }  # fmt: skip
