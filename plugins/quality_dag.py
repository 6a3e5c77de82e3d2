"""The DAG `motley_quality__<run>`: reads the rollouts of every iteration that was reported and writes a report on them.

It is a consumer of the run's asset like those of a data team, and an example of one: nothing of the training waits for
it. One DAG run per partition; made again, a report comes out the same and replaces the one before.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from airflow.sdk import DAG, BaseOperator, Context, PartitionedAssetTimetable
from pydantic import JsonValue

from plugins.alert_callbacks import store_of
from plugins.assets import iteration_of_partition, rollouts_asset
from plugins.retry_policies import RETRIES, stage_retry_policy
from stages.run_entry import RunEntry
from storage.quality import build_quality_report, write_quality_report

QUALITY_PREFIX: Final = "motley_quality__"
"""Prefix of the DAG ids; no run's DAG can have it."""

_DOC: Final = """\
# Quality of the rollouts of `{run}`

One DAG run per RL iteration, started by the asset that the run's `report` task updates. It reads the iteration's
committed rollouts and writes `{root}/{run}/iterations/<k>/quality.json`. Delete it or pause it as you like: nothing
waits for it.
"""


class QualityReportOperator(BaseOperator):
    """Writes the quality report of the iteration that the DAG run's partition names."""

    ui_color = "#e4f0d8"

    def __init__(self, *, entry: RunEntry, **kwargs: Any) -> None:  # noqa: ANN401 - BaseOperator's own arguments
        """Keep the arguments.

        Args:
            entry: The run's entry.
            **kwargs: Arguments of `BaseOperator`.
        """
        super().__init__(**kwargs)
        self.entry = entry

    def execute(self, context: Context) -> dict[str, JsonValue]:
        """Write the report; return its key and the rules that the iteration breaks.

        Raises:
            ContractError: the DAG run has no partition of an iteration.
            ObjectMissingError: the iteration's rollouts are gone (rewound meanwhile, or removed).
        """
        iteration = iteration_of_partition(context["dag_run"].partition_key)
        store = store_of(self.entry)
        report = build_quality_report(store, self.entry.run, iteration)
        for check in report.checks:
            if not check.is_good:
                self.log.warning("iteration %d: %s is %s, above %s", iteration, check.name, check.found, check.limit)
        key = write_quality_report(store, report)
        self.log.info("written: %s/%s", store.url, key)
        return {"artefacts": [key], "faults": list(report.faults)}


def build_quality_dag(entry: RunEntry) -> DAG:
    """Return the quality DAG of a run."""
    dag = DAG(
        dag_id=f"{QUALITY_PREFIX}{entry.run}",
        description=f"Quality of the rollouts of run {entry.run}, iteration by iteration",
        doc_md=_DOC.format(run=entry.run, root=entry.root),
        schedule=PartitionedAssetTimetable(assets=rollouts_asset(entry.run)),
        catchup=False,
        is_paused_upon_creation=False,
        max_active_runs=1,
        default_args={
            "owner": "motley", "retries": RETRIES, "retry_delay": timedelta(seconds=2),
            "retry_policy": stage_retry_policy(), "weight_rule": "absolute",
        },
        tags=["motley", "quality"],
    )  # fmt: skip
    with dag:
        # Behind everything that trains.
        QualityReportOperator(task_id="quality_report", entry=entry, queue=entry.control.queue, priority_weight=1)
    return dag
