"""What scheduling the iterations of a run costs Airflow's scheduler, by the number of machines.

`.venv/bin/python -m benchmarks.dag_width.schedule --machines 4 16 64 --iterations 50 --out
benchmarks/dag_width/results/schedule.json`

Real are the DAG of a run, its timetable, Airflow's database (SQLite, with the settings of a deployment) and the
scheduler's own loop. The executor ends every task in the moment in which it gets it, as the execution API would: what
is measured is the scheduler, and nothing of the processes of tasks, workers, API server and triggerer. No row is
skipped, so an iteration has all rows of the DAG.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.dag_width.build import entry_of
from benchmarks.planner.record import environment
from cli.deployment_record import DeploymentRecord, Ports, Worker
from cli.deployment_settings import DAGS_DIR, REPOSITORY, airflow_environment
from stages.home import MotleyHome, dag_id_of

IDLE_LOOPS = 10
"""Looks in a row at which the scheduler finds nothing to do, after which it is over."""


def main() -> int:
    """Measure each width in a process of its own, and write; exit code 1 when costs grow faster than the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--machines", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--inside", action="store_true", help="Measure one width in this process, set up for it.")
    given = parser.parse_args()
    if given.inside:
        print("@" + json.dumps(measure(given.machines[0], given.iterations)))
        return 0
    found = [_apart(count, given.iterations) for count in given.machines]
    for one in found:
        print(json.dumps(one))
    if given.out:
        load = os.getloadavg()
        document = {"environment": environment(), "load_after": load, "iterations": given.iterations, "results": found}
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    per_machine = [one["cpu_ms_per_iteration"] / one["machines"] for one in found]
    return 0 if per_machine[-1] <= per_machine[0] else 1


def _apart(num_machines: int, iterations: int) -> dict[str, Any]:
    """Measure in a process whose Airflow has a home, a database and the settings of a deployment with workers."""
    with tempfile.TemporaryDirectory(prefix="motley-schedule-") as folder:
        home = MotleyHome(Path(folder))
        for part in (home.runs_dir, home.airflow_dir / "plugins", home.airflow_dir / "logs"):
            part.mkdir(parents=True)
        entry = entry_of(num_machines).model_copy(update={"iterations": iterations})
        home.run_entry_file(entry.run).write_text(entry.to_json())
        worker = Worker(machine="m-0", region="east", gpu="cpu", count=1, queue="q-0", concurrency=1, roots=())
        record = DeploymentRecord(
            ports=Ports(api=1, worker_logs=2, trigger_logs=3), airflow_python=sys.executable,
            engines_python=sys.executable, workers=(worker,),
        )  # fmt: skip
        done = subprocess.run(
            [
                sys.executable, "-m", "benchmarks.dag_width.schedule", "--inside", "--machines", str(num_machines),
                "--iterations", str(iterations),
            ],
            env={**airflow_environment(record, home, os.environ), "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR"},
            capture_output=True, text=True, check=False, cwd=REPOSITORY,
        )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"measuring {num_machines} machines failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.rpartition("@")[2])
    return found


def measure(num_machines: int, iterations: int) -> dict[str, Any]:
    """Return what scheduling all iterations cost, in the Airflow of this process's environment."""
    from airflow.jobs.job import Job, run_job
    from airflow.jobs.scheduler_job_runner import SchedulerJobRunner

    from benchmarks.dag_width.instant_executor import InstantExecutor

    _fill_database()
    executor, job = InstantExecutor(), Job()
    runner = SchedulerJobRunner(job=job, num_runs=IDLE_LOOPS, only_idle=True, executors=[executor])
    cpu, wall = time.process_time(), time.perf_counter()
    run_job(job=job, execute_callable=runner._execute)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    states, seconds = _outcome(entry_of(num_machines).run)
    if states != {"success": iterations}:
        raise SystemExit(f"{iterations} iterations ended as {states}: the scheduler did not finish them")
    return {
        "machines": num_machines,
        "tasks_per_iteration": executor.num_tasks // iterations,
        "loops_per_iteration": round((executor.num_loops - IDLE_LOOPS) / iterations, 1),
        "cpu_ms_per_iteration": round(1000 * cpu / iterations, 1),
        "cpu_ms_per_task": round(1000 * cpu / executor.num_tasks, 2),
        "wall_ms_per_iteration": round(1000 * wall / iterations, 1),
        "median_iteration_s": round(sorted(seconds)[len(seconds) // 2], 3),
        "widest_batch": executor.widest_batch,
    }


def _fill_database() -> None:
    """Make the database, and do what the DAG processor does with the DAG file."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.utils.db import initdb
    from airflow.utils.session import create_session

    initdb()
    bag = DagBag(dag_folder=str(DAGS_DIR), bundle_path=DAGS_DIR, bundle_name="dags-folder")
    with create_session() as session:
        DagBundlesManager().sync_bundles_to_db(session=session)
    with create_session() as session:
        sync_bag_to_db(bag, "dags-folder", bundle_version=None, session=session)


def _outcome(run: str) -> tuple[dict[str, int], list[float]]:
    """Return how many DAG runs ended in each state, and the seconds from start to end of each."""
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    states: dict[str, int] = {}
    seconds = []
    with create_session() as session:
        for found in session.scalars(select(DagRun).where(DagRun.dag_id == dag_id_of(run))):
            states[str(found.state)] = states.get(str(found.state), 0) + 1
            if found.start_date and found.end_date:
                seconds.append((found.end_date - found.start_date).total_seconds())
    return states, seconds


if __name__ == "__main__":
    sys.exit(main())
