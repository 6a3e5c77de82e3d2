"""The DAGs of a run in Airflow's own database: versions, the deadline of an iteration, and partitions with a consumer.

Nothing is scheduled; the script calls what the DAG processor, the API server and the scheduler would call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from stages.run_entry import MachineEntry, RunEntry
from tests.helpers.kept_alerts import told, write_settings

REPOSITORY = Path(__file__).parents[3]

SCRIPT = """
import asyncio
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from airflow.utils.db import initdb

initdb()
from airflow.api_fastapi.execution_api.datamodels.asset import AssetProfile
from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
from airflow.jobs.job import Job
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
from airflow.models.dag_version import DagVersion
from airflow.models.dagrun import DagRun
from airflow.models.deadline import Deadline
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.trigger import Trigger
from airflow.sdk.execution_time.context import OutletEventAccessors
from airflow.sdk.execution_time.task_runner import _serialize_outlet_events
from airflow.triggers.callback import CallbackTrigger
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from sqlalchemy import func, select

from plugins.assets import partition_of, rollouts_asset
from stages.home import logical_date_of
from storage.policies import publish_policy
from storage.store import open_store
from tests.helpers.storage_builders import policy_files

told, root = sys.argv[1:]
found = {}
with create_session() as session:
    DagBundlesManager().sync_bundles_to_db(session=session)
for _ in range(3):  # the DAG processor looks again and again
    folder = Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    bag = DagBag(dag_folder=str(folder), bundle_path=folder, bundle_name="dags-folder")
    assert not bag.import_errors, bag.import_errors
    with create_session() as session:
        sync_bag_to_db(bag, "dags-folder", bundle_version=None, session=session)

with create_session() as session:
    query = select(DagVersion.dag_id, func.count()).group_by(DagVersion.dag_id).order_by(DagVersion.dag_id)
    found["versions"] = [list(row) for row in session.execute(query)]
    dag = SerializedDagModel.get_dag("motley__demo", session=session)
    for k in range(2):
        when = logical_date_of(k)
        run = dag.create_dagrun(
            run_id=f"scheduled__demo.iter-{k:06d}", logical_date=when,
            data_interval=(when, when + timedelta(minutes=1)), run_after=when, run_type=DagRunType.SCHEDULED,
            triggered_by=DagRunTriggeredByType.TIMETABLE, state=DagRunState.QUEUED, session=session,
        )
        session.flush()
        # What the report task of the iteration does at its end.
        asset, events = rollouts_asset("demo"), OutletEventAccessors()
        events[asset].add_partitions(partition_of(k))
        report = next(ti for ti in run.get_task_instances(session=session) if ti.task_id == "report")
        for callback in TaskInstance.register_asset_changes_in_db(
            report, [AssetProfile(name=asset.name, uri=asset.uri, type="Asset")],
            list(_serialize_outlet_events(events)), session=session,
        ):
            callback()
    session.flush()
    SchedulerJobRunner(job=Job(), executors=[])._create_dagruns_for_partitioned_asset_dags(session)
    session.flush()
    query = select(DagRun.partition_key).where(DagRun.dag_id == "motley_quality__demo").order_by(DagRun.partition_key)
    found["partitions"] = list(session.scalars(query))

    deadline = session.scalars(select(Deadline).order_by(Deadline.deadline_time)).first()
    found["after_s"] = (deadline.deadline_time - deadline.dagrun.queued_at).total_seconds()
    deadline.handle_miss(session)
    session.flush()
    kwargs = session.scalars(select(Trigger)).one().kwargs


async def commit():  # lets the iteration end as soon as its stall was told
    while not Path(told).exists():
        await asyncio.sleep(0.1)
    store = open_store(root)
    for version in (0, 1):
        publish_policy(store, "demo", version, policy_files(version), created_by="test", is_head=True)


async def watch():
    committing = asyncio.create_task(commit())
    seen = [event.payload async for event in CallbackTrigger(**kwargs).run()]
    await committing
    return seen


found["events"] = asyncio.run(asyncio.wait_for(watch(), 600))
print("@" + json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script saw, and what was told meanwhile."""
    tmp_path = tmp_path_factory.mktemp("airflow-database")
    home = tmp_path / "home"
    file = write_settings(home, "FileNotifier")
    entry = RunEntry(
        run="demo", roots={"here": str(tmp_path / "store")}, iterations=3, stall_check_s=0.5, has_quality_report=True,
        machines=(MachineEntry(name="box", queue="q", region="here"),),
    )  # fmt: skip
    (home / "runs").mkdir()
    (home / "runs" / "demo.json").write_text(entry.to_json())
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
        "MOTLEY_HOME": str(home), "PYTHONPATH": str(REPOSITORY), "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(REPOSITORY / "dags"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "0", "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "3600",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file), str(tmp_path / "store")],
        env=environment, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.rpartition("@")[2]), "told": told(file)}


def test_each_dag_has_one_version_however_often_it_is_read(found: dict[str, Any]) -> None:
    assert found["versions"] == [["motley__demo", 1], ["motley_quality__demo", 1], ["motley_rescore__demo", 1]]


def test_each_reported_iteration_is_a_partition_with_one_run_of_the_consumer(found: dict[str, Any]) -> None:
    assert found["partitions"] == ["iter-000000", "iter-000001"]


def test_a_missed_deadline_starts_the_watch_which_tells_the_stall_and_ends_with_the_iteration(
    found: dict[str, Any],
) -> None:
    assert found["after_s"] == pytest.approx(0.5)
    assert [event["state"] for event in found["events"]] == ["running", "success"], found["events"]
    assert found["events"][1]["body"] == "iteration 0 is committed"
    assert found["told"][0].startswith("stalled of demo: run demo, iteration 0: no iteration ended for ")
