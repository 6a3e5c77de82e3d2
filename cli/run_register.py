"""From two files to a run that Airflow drives: resolve, check, record, register, wait for the DAG."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from cli.deployment_api import AirflowApi
from cli.deployment_record import DeploymentRecord
from cli.deployment_settings import DAGS_DIR, start_timeout_s
from cli.deployment_workers import missing_queues
from cli.errors import CommandError, DeploymentError, InputError
from stages.check_notice import NOTICE
from stages.home import MotleyHome, dag_id_of
from stages.run_entry import RunEntry
from stages.runs import entry_of, load_run

PREFLIGHT_TIMEOUT_S = 900.0
"""Longest preflight, which reads the whole dataset, where the environment says no longer one."""

DAG_TIMEOUT_S = 180.0
"""Longest wait until Airflow has parsed a new run's DAG, where the environment says nothing else."""

DAG_FILE = DAGS_DIR / "motley_runs.py"
"""File from which Airflow makes the DAGs of all runs."""


def default_name(job_name: str, now: datetime) -> str:
    """Return a run name for a job: the job's name and the time, fit for an object key."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).strip("-._") or "run"
    return f"{safe[:60]}-{now:%Y%m%d-%H%M%S}"


def entry_from_store(root: str, run: str) -> RunEntry:
    """Return the entry of a run whose data lies under a root, for a deployment that does not know it yet."""
    return entry_of(load_run(root, run))


def register(entry: RunEntry, home: MotleyHome) -> None:
    """Write the entry, whole or not at all; from then on the DAG factory sees the run."""
    file = home.run_entry_file(entry.run)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(entry.to_json(), encoding="utf-8")
    temporary.replace(file)


def preflight(
    engines_python: str, job: Path, cluster: Path, cache: Path, report: Callable[[str], None], *, root: Path
) -> None:
    """Check model, data, rewards and machines where the engines run, before anything is started.

    Args:
        engines_python: Interpreter of the engines' environment.
        job: Job file.
        cluster: Cluster file.
        cache: Folder in which the encoded prompts stay for the run's first stage.
        report: Told what was found.
        root: Store of regions for which neither file names one; its disk must have room.

    Raises:
        InputError: something of the files can't be used; the message has all faults.
        CommandError: the check itself failed.
    """
    command = [
        engines_python,
        "-m",
        "stages",
        "check",
        "--job",
        str(job.absolute()),
        "--cluster",
        str(cluster.absolute()),
        "--cache",
        str(cache),
        "--root",
        str(root),
    ]
    timeout_s = max(PREFLIGHT_TIMEOUT_S, start_timeout_s(PREFLIGHT_TIMEOUT_S))
    try:
        done = _run_check(command, timeout_s, report)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"The preflight check of {job} did not end within {timeout_s:.0f} s.") from error
    if done.returncode == 0:
        for line in done.stdout.splitlines():
            report(line)
        return
    text = done.stderr.strip() or done.stdout.strip() or f"the preflight check ended with exit code {done.returncode}"
    if done.returncode == InputError.exit_code:
        from stages.check import CHECK_HEADLINE  # with the planner behind it

        raise InputError(text[max(0, text.rfind(CHECK_HEADLINE)) :])  # without what libraries wrote before it
    raise CommandError(text)


def _run_check(command: list[str], timeout_s: float, report: Callable[[str], None]) -> subprocess.CompletedProcess[str]:
    """Return how the check ended; its notices are reported while it runs.

    Raises:
        subprocess.TimeoutExpired: it did not end in time and was killed.
    """
    expired, others = threading.Event(), list[str]()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as output,
        # Not in the user's folder: a module that is found there only would be missing in the stages.
        subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd="/") as process,
    ):

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            for line in process.stderr or ():
                if line.startswith(NOTICE):
                    report(line.removeprefix(NOTICE).rstrip())
                else:
                    others.append(line)
            code = process.wait()
        finally:
            timer.cancel()
        if expired.is_set():
            raise subprocess.TimeoutExpired(command, timeout_s)
        output.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), "".join(others))


def check_served(deployment: DeploymentRecord, entry: RunEntry, cluster: Path | None = None) -> None:
    """Demand that every machine of a run has a worker, or that there is one machine and tasks run beside the scheduler.

    Raises:
        InputError: a machine has no worker; says how to start it.
    """
    file = str(cluster) if cluster is not None else "FILE"
    if not deployment.has_workers:
        if len(entry.machines) > 1:
            raise InputError(
                f"Run {entry.run} has {len(entry.machines)} machines, but the deployment has no workers, so all their "
                f"tasks would run here; start it with `motley down`, then `motley up --cluster {file}`."
            )
        return
    with AirflowApi(deployment.url) as api:
        needed = [machine for machine in entry.machines if machine.name not in entry.drained]
        missing = missing_queues(api, [machine.queue for machine in needed])
    names = [machine.name for machine in needed if machine.queue in missing]
    if names:
        raise InputError(
            f"Machine(s) {', '.join(names)} of run {entry.run} have no worker; start one for each with "
            f"`motley worker --machine {names[0]} --cluster {file}`, or all on this computer with "
            f"`motley up --cluster {file}`."
        )


def wait_for_dag(api: AirflowApi, entry: RunEntry) -> None:
    """Make Airflow parse the DAG file soon and wait until it knows the run with its present number of iterations.

    Raises:
        DeploymentError: the DAG does not appear; says which import error Airflow has, if any.
    """
    dag_id, summary = dag_id_of(entry.run), f"{entry.iterations} iterations"
    timeout_s = start_timeout_s(DAG_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    asked_at = 0.0
    while True:
        dag = api.dag(dag_id)
        if dag is not None and dag.get("timetable_summary") == summary and not dag.get("is_stale"):
            return
        if time.monotonic() - asked_at > 10.0:
            _ask_for_parse()
            asked_at = time.monotonic()
        if time.monotonic() > deadline:
            faults = [str(fault.get("stack_trace", "")).strip().splitlines()[-1] for fault in api.import_errors()]
            reason = (
                f"its import error is: {faults[0]}"
                if faults
                else "the dag-processor has not parsed it; see `motley status`"
            )
            raise DeploymentError(f"Airflow does not show DAG {dag_id} after {timeout_s:.0f} s; {reason}.")
        time.sleep(0.3)


def _ask_for_parse() -> None:
    """Give the DAG file a new modification time: the processor then parses it at once, not when its turn comes."""
    try:
        os.utime(DAG_FILE)
    except OSError:
        return  # a read-only installation: it is parsed within `min_file_process_interval`
