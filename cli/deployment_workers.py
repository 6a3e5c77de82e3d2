"""Edge workers on this computer: one for each machine of a cluster file, each with a home and logs of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from cli.deployment_api import AirflowApi
from cli.deployment_processes import component_process
from cli.deployment_record import ComponentProcess, DeploymentRecord, Worker, write_record
from cli.deployment_settings import WORKER_HEARTBEAT_S, named_settings, start_timeout_s, worker_environment
from cli.errors import DeploymentError, InputError
from plans.spec.cluster import Cluster, Machine
from stages.home import DEPLOYMENT_VARIABLE, ENGINES_PYTHON_VARIABLE, MotleyHome

DEFAULT_CONCURRENCY = 4
"""Tasks that a worker runs at a time: stages of different iterations, the gate and bookkeeping."""

GONE_STATES = frozenset({"unknown", "offline", "offline maintenance"})
"""States in which Airflow lets another worker take the name."""

REGISTER_TIMEOUT_S = 120.0
"""Longest wait until a started worker has reported itself, where the environment says nothing else."""

MISSED_S = 8.0 * WORKER_HEARTBEAT_S
"""Longest wait until Airflow has missed a worker that was killed."""


def workers_of(cluster: Cluster, home: MotleyHome) -> tuple[Worker, ...]:
    """Return a worker for every machine of a cluster file."""
    return tuple(worker_of(cluster, machine, [str(home.store_dir)]) for machine in cluster.machines)


def worker_of(
    cluster: Cluster, machine: Machine, roots: Sequence[str], concurrency: int = DEFAULT_CONCURRENCY
) -> Worker:
    """Return the worker of a machine; it looks for runs in the cluster file's roots and in those given."""
    return Worker(
        machine=machine.name,
        queue=machine.queue_name,
        region=machine.region,
        gpu=machine.gpu,
        count=machine.count,
        concurrency=concurrency,
        roots=tuple(dict.fromkeys([*cluster.storage.values(), *roots])),
    )


def find_machine(cluster: Cluster, name: str) -> Machine:
    """Return a machine of a cluster by name.

    Raises:
        InputError: there is none; names those there are.
    """
    for machine in cluster.machines:
        if machine.name == name:
            return machine
    known = ", ".join(machine.name for machine in cluster.machines)
    raise InputError(f"Cluster {cluster.name} has no machine {name!r}; its machines are {known}.")


def is_running(worker: Worker) -> bool:
    """Whether a worker's process runs."""
    return worker.process is not None and component_process(worker.process) is not None


def worker_log(home: MotleyHome, machine: str) -> Path:
    """Return the log of a worker."""
    return home.worker_home(machine).airflow_dir / "logs" / "worker.log"


def worker_command(python: str, worker: Worker, pid_file: Path) -> list[str]:
    """Return the command line of a worker."""
    return [
        python, "-m", "airflow", "edge", "worker", "--edge-hostname", worker.machine, "--queues", worker.queue,
        "--concurrency", str(worker.concurrency), "--pid", str(pid_file),
    ]  # fmt: skip


def prepare_home(home: MotleyHome) -> Path:
    """Make a worker's directories and return the file for its process id."""
    for folder in (home.airflow_dir / "logs", home.airflow_dir / "plugins", home.path / "state"):
        folder.mkdir(parents=True, exist_ok=True)
    pid_file = home.airflow_dir / "worker.pid"
    pid_file.unlink(missing_ok=True)  # of a worker that was killed; the name's registration tells duplicates
    return pid_file


def ensure_workers(
    record: DeploymentRecord, home: MotleyHome, environment: Mapping[str, str], report: Callable[[str], None]
) -> DeploymentRecord:
    """Start the recorded workers that do not run and wait until all have reported themselves.

    Raises:
        DeploymentError: one ended, or did not report itself in time; names its log.
    """
    missing = [worker for worker in record.workers if not is_running(worker)]
    if not missing:
        return record
    with AirflowApi(record.url) as api:
        for worker in missing:
            wait_until_free(api, worker.machine)
        started = {worker.machine: _start(worker, record, home, environment) for worker in missing}
        workers = tuple(started.get(worker.machine, worker) for worker in record.workers)
        record = record.model_copy(update={"workers": workers})
        write_record(home.deployment_file, record)
        _wait_until_reported(api, list(started.values()), home)
    for worker in started.values():
        report(f"worker {worker.machine} is up (queue {worker.queue})")
    return record


def wait_until_free(api: AirflowApi, machine: str) -> None:
    """Wait until no living worker has a machine's name.

    Airflow gives a name to another worker only after the old one signed off or missed five heartbeats.

    Raises:
        InputError: a living worker has it.
    """
    first = _worker_state(api, machine)
    deadline = time.monotonic() + MISSED_S
    while (now := _worker_state(api, machine)) is not None and now["state"] not in GONE_STATES:
        if first is not None and now["last_heartbeat"] != first["last_heartbeat"]:
            raise InputError(
                f"Machine {machine} has a worker already (state {now['state']}, last heard of at "
                f"{now['last_heartbeat']}); end that one first, or give this worker another machine of the cluster "
                "file."
            )
        if time.monotonic() > deadline:
            raise DeploymentError(
                f"Airflow has not missed the last worker of machine {machine} in {MISSED_S:.0f} s; look at "
                "`motley status`: the scheduler may be gone."
            )
        time.sleep(1.0)


def missing_queues(api: AirflowApi, queues: Sequence[str]) -> list[str]:
    """Return the queues that no living worker serves."""
    served = {
        queue for worker in api.workers() if worker["state"] not in GONE_STATES for queue in worker["queues"] or ()
    }
    return [queue for queue in queues if queue not in served]


def seconds_since(moment: str | None) -> float | None:
    """Return the age of a time that the API gave, seconds."""
    if moment is None:
        return None
    return (datetime.now(UTC) - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()


def _start(worker: Worker, record: DeploymentRecord, home: MotleyHome, environment: Mapping[str, str]) -> Worker:
    own = home.worker_home(worker.machine)
    pid_file = prepare_home(own)
    settings = worker_environment(worker, own, environment, url=record.url, jwt_secret=record.jwt_secret)
    settings |= {ENGINES_PYTHON_VARIABLE: record.engines_python, DEPLOYMENT_VARIABLE: record.id}
    settings |= named_settings(home, environment)
    with worker_log(home, worker.machine).open("ab") as log:
        child = subprocess.Popen(
            worker_command(record.airflow_python, worker, pid_file),
            env=settings, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=own.path,
        )  # fmt: skip
    process = ComponentProcess(
        name=f"worker {worker.machine}", pid=child.pid, started_at=psutil.Process(child.pid).create_time()
    )
    return worker.model_copy(update={"process": process})


def _wait_until_reported(api: AirflowApi, workers: Sequence[Worker], home: MotleyHome) -> None:
    timeout_s = start_timeout_s(REGISTER_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    waiting = list(workers)
    while waiting:
        waiting = [w for w in waiting if (_worker_state(api, w.machine) or {}).get("state") in (None, *GONE_STATES)]
        dead = [worker for worker in waiting if not is_running(worker)]
        late = waiting if time.monotonic() > deadline else []
        if dead or late:
            worker = (dead or late)[0]
            what = "ended while starting" if dead else f"did not report itself within {timeout_s:.0f} s"
            raise DeploymentError(
                f"The worker of machine {worker.machine} {what}; see its log {worker_log(home, worker.machine)}."
            )
        time.sleep(0.5)


def _worker_state(api: AirflowApi, machine: str) -> dict[str, Any] | None:
    return next((worker for worker in api.workers() if worker["worker_name"] == machine), None)
