"""Bringing the embedded Airflow up."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from cli.deployment_api import HEALTH_NAMES, AirflowApi
from cli.deployment_checks import airflow_python, check_airflow_home, check_home, engines_python, mark_airflow_home
from cli.deployment_ports import PREFERRED_API_PORT, any_free, demand_free, is_free
from cli.deployment_processes import end_airflow, listens, marked_processes, running_components
from cli.deployment_record import (
    COMPONENTS,
    ComponentProcess,
    DeploymentRecord,
    Ports,
    Worker,
    read_record,
    write_record,
)
from cli.deployment_settings import DATABASE_VARIABLE, START_TIMEOUT_VARIABLE, airflow_environment, start_timeout_s
from cli.deployment_workers import ensure_workers, is_running, workers_of
from cli.errors import DeploymentError
from plans.spec.cluster import Cluster
from stages.home import MotleyHome
from stages.launch import STAGE_PART

START_TIMEOUT_S = 240.0
"""Longest wait for all components to be healthy, where the environment says nothing else."""

PORT_ATTEMPTS = 3
"""Starts with another port when the chosen one was lost to another program before the API server had it."""

PATIENCE_S = 60.0
"""Longest wait for a running deployment that does not say that it is healthy, before it is restarted."""

Report = Callable[[str], None]
"""Takes one line of progress."""


def bring_up(
    home: MotleyHome,
    *,
    port: int | None,
    environment: Mapping[str, str],
    report: Report,
    cluster: Cluster | None = None,
    database_url: str | None = None,
) -> DeploymentRecord:
    """Return a running deployment; one that is up already is left alone, a damaged one is restarted.

    Stage processes and engines of an earlier life keep running: the restarted tasks re-attach to them.

    Args:
        home: Local files.
        port: Port of the UI; None takes the last one or a free one.
        environment: The caller's environment.
        report: Takes progress.
        cluster: Machines that get a worker each on this computer; None keeps what the deployment had.
        database_url: SQLAlchemy URL of the metadata database; None keeps what the deployment had, at first that of
            the caller's environment (MOTLEY_DATABASE_URL), else SQLite.

    Raises:
        DeploymentError: it can't be started, or did not come up.
        PortInUseError: the port asked for belongs to somebody else.
        InputError: the wait that the environment names is no positive number.
    """
    check_home(home)
    start_timeout_s(START_TIMEOUT_S)  # a wrong one is refused before anything starts
    with _locked(home, report):
        before = read_record(home.deployment_file)
        wanted = before
        if before is not None:
            wanted = with_workers(before, home, cluster, database_url)
            is_same_kind = (wanted.has_workers, wanted.database_url) == (before.has_workers, before.database_url)
            if is_same_kind and port in (None, before.ports.api) and becomes_healthy(before):
                return ensure_workers(wanted, home, environment, report)
            _end_leftovers(before, report)
        record, version = _new_record(wanted, port, environment)
        if before is None:
            record = with_workers(record, home, cluster, database_url or environment.get(DATABASE_VARIABLE) or None)
        return ensure_workers(_start_fresh(record, version, home, port, environment, report), home, environment, report)


def with_workers(
    record: DeploymentRecord, home: MotleyHome, cluster: Cluster | None, database_url: str | None
) -> DeploymentRecord:
    """Return the record with a worker for every machine of a cluster and with a database.

    Raises:
        DeploymentError: stages run and would lose their executor, or a machine changed under its running worker.
    """
    wanted = record if database_url is None else record.model_copy(update={"database_url": database_url})
    if cluster is None:
        return wanted
    known = {worker.machine: worker for worker in record.workers}
    if not known and (running := marked_processes(record.id, part=STAGE_PART)):
        raise DeploymentError(
            f"The deployment in {home.path} runs its tasks by itself and {len(running)} stage or engine process(es) "
            "are alive; end them with `motley down` before its machines get workers."
        )
    workers = []
    for worker in workers_of(cluster, home):
        old = known.pop(worker.machine, None)
        if old is None or not is_running(old):
            workers.append(worker)
        elif old.model_copy(update={"process": None, "concurrency": worker.concurrency}) == worker:
            workers.append(old)
        else:
            raise DeploymentError(
                f"Machine {worker.machine} changed in the cluster file ({_difference(old, worker)}) while its worker "
                "runs; restore the file, or stop with `motley down` and start again."
            )
    return wanted.model_copy(update={"workers": (*workers, *known.values())})


def _difference(old: Worker, new: Worker) -> str:
    fields = ("queue", "region", "gpu", "count", "roots")
    return ", ".join(
        f"{name} {getattr(old, name)} -> {getattr(new, name)}"
        for name in fields
        if getattr(old, name) != getattr(new, name)
    )


def _start_fresh(
    record: DeploymentRecord,
    version: str,
    home: MotleyHome,
    port: int | None,
    environment: Mapping[str, str],
    report: Report,
) -> DeploymentRecord:
    must_migrate = check_airflow_home(home, version, database_url=record.database_url)
    write_record(home.deployment_file, record)
    home.airflow_dir.mkdir(parents=True, exist_ok=True)
    if must_migrate:
        mark_airflow_home(home, version, database_url=record.database_url, is_migrated=False)
    _make_folders(home)
    if must_migrate:
        report("preparing Airflow's database (10 s)")
        _migrate(record, home, airflow_environment(record, home, environment))
        mark_airflow_home(home, version, database_url=record.database_url)
    num_other_ports = PORT_ATTEMPTS - 1 if port is None else 0
    for _ in range(num_other_ports):
        started = _start_all(record, home, environment)
        try:
            wait_until_healthy(started, home, report)
        except DeploymentError:
            if is_free(record.ports.api):
                raise
            report(f"port {record.ports.api} was taken by another program meanwhile; trying another one")
            record = record.model_copy(update={"ports": _choose_ports(None, any_free())})
        else:
            return started
    started = _start_all(record, home, environment)
    wait_until_healthy(started, home, report)
    return started


def is_up(record: DeploymentRecord) -> bool:
    """Whether every component runs and says that it is healthy."""
    if len(running_components(record)) < len(COMPONENTS) or not _has_its_port(record):
        return False
    with AirflowApi(record.url) as api:
        return all(state == "healthy" for state in api.health().values())


def _has_its_port(record: DeploymentRecord) -> bool:
    return any(listens(part, record.ports.api) for part in record.processes if part.name == "api-server")


def becomes_healthy(record: DeploymentRecord) -> bool:
    """Whether every component runs and is healthy now or soon: on a busy machine heartbeats come late."""
    deadline = time.monotonic() + PATIENCE_S
    while len(running_components(record)) == len(COMPONENTS):
        if is_up(record):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return False


def wait_until_healthy(record: DeploymentRecord, home: MotleyHome, report: Report) -> None:
    """Wait for all components; end them all again when one fails.

    Raises:
        DeploymentError: a component ended, or did not become healthy in time; names its log and last lines.
    """
    timeout_s = start_timeout_s(START_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    told: dict[str, str | None] = {}
    with AirflowApi(record.url) as api:
        while True:
            states = api.health() if _has_its_port(record) else dict.fromkeys(HEALTH_NAMES)
            for name, state in states.items():
                if state == "healthy" and told.get(name) != state:
                    report(f"{name.replace('_', ' ')} is up")
            told = states
            if all(state == "healthy" for state in states.values()) and _has_its_port(record):
                return
            running = {component.name for component in running_components(record)}
            dead = [component.name for component in record.processes if component.name not in running]
            if dead or time.monotonic() > deadline:
                end_airflow(record, grace_s=5.0)
                raise DeploymentError(_failure(dead, states, home, timeout_s))
            time.sleep(0.5)


def log_file(home: MotleyHome, component: str) -> Path:
    """Return the log of a component."""
    return home.airflow_dir / "logs" / "components" / f"{component}.log"


def _end_leftovers(record: DeploymentRecord, report: Report) -> None:
    if running_components(record):
        report("some parts of the deployment are gone; restarting Airflow (stage processes go on)")
    # Killed, not asked to end: a task that is asked to end would end its stage process too.
    left = end_airflow(record, grace_s=0.0)
    if left:
        raise DeploymentError(
            f"processes {[process.pid for process in left]} of the last deployment can't be ended; end them by hand."
        )


def _new_record(
    before: DeploymentRecord | None, port: int | None, environment: Mapping[str, str]
) -> tuple[DeploymentRecord, str]:
    python, version = airflow_python(environment)
    engines = engines_python(environment, before.engines_python if before else None)
    ports = _choose_ports(before.ports if before else None, port)
    if before is not None:
        update = {"ports": ports, "airflow_python": python, "engines_python": engines, "processes": ()}
        return before.model_copy(update=update), version
    return DeploymentRecord(ports=ports, airflow_python=python, engines_python=engines), version


def _choose_ports(before: Ports | None, asked: int | None) -> Ports:
    if asked is not None:
        api = demand_free(asked)
    else:
        wishes = [before.api if before else PREFERRED_API_PORT, PREFERRED_API_PORT]
        api = next((port for port in wishes if is_free(port)), None) or any_free()
    worker_logs = (
        before.worker_logs if before and before.worker_logs != api and is_free(before.worker_logs) else any_free([api])
    )
    return Ports(api=api, worker_logs=worker_logs, trigger_logs=any_free([api, worker_logs]))


def _make_folders(home: MotleyHome) -> None:
    for folder in (home.runs_dir, home.store_dir, home.path / "state", home.airflow_dir / "plugins"):
        folder.mkdir(parents=True, exist_ok=True)
    log_file(home, "any").parent.mkdir(parents=True, exist_ok=True)


def _migrate(record: DeploymentRecord, home: MotleyHome, settings: Mapping[str, str]) -> None:
    with log_file(home, "db-migrate").open("ab") as log:
        done = subprocess.run(
            [record.airflow_python, "-m", "airflow", "db", "migrate"],
            env=dict(settings), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            check=False, cwd=home.path,
        )  # fmt: skip
    if done.returncode != 0:
        raise DeploymentError(
            f"Airflow's database {_database_name(record, home)} can't be prepared (exit code {done.returncode}); "
            "see "
            f"{log_file(home, 'db-migrate')}:\n{_tail(log_file(home, 'db-migrate'))}"
        )


def _database_name(record: DeploymentRecord, home: MotleyHome) -> str:
    """Return the database for a message, without its password."""
    if record.database_url is None:
        return str(home.airflow_dir / "airflow.db")
    scheme, _, rest = record.database_url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _start_all(record: DeploymentRecord, home: MotleyHome, environment: Mapping[str, str]) -> DeploymentRecord:
    settings = airflow_environment(record, home, environment)
    processes = tuple(_start(name, record, home, settings) for name in COMPONENTS)
    started = record.model_copy(update={"processes": processes})
    write_record(home.deployment_file, started)
    return started


def _start(name: str, record: DeploymentRecord, home: MotleyHome, settings: Mapping[str, str]) -> ComponentProcess:
    with log_file(home, name).open("ab") as log:
        child = subprocess.Popen(
            [record.airflow_python, "-m", "airflow", name],
            env=dict(settings), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=home.path,
        )  # fmt: skip
    return ComponentProcess(name=name, pid=child.pid, started_at=psutil.Process(child.pid).create_time())


def _failure(dead: list[str], states: Mapping[str, str | None], home: MotleyHome, timeout_s: float) -> str:
    if dead:
        log = log_file(home, dead[0])
        return (
            f"Airflow's {dead[0]} ended while starting; all was stopped again; its log {log} ends with:\n{_tail(log)}"
        )
    waiting = [name for name, state in states.items() if state != "healthy"]
    return (
        f"Airflow's {', '.join(waiting)} did not become healthy within {timeout_s:.0f} s; all was stopped again; see "
        f"the logs in {log_file(home, 'any').parent}, or on a busy machine set {START_TIMEOUT_VARIABLE} higher."
    )


def _tail(file: Path, lines: int = 12) -> str:
    try:
        return "\n".join(file.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


@contextmanager
def _locked(home: MotleyHome, report: Report) -> Iterator[None]:
    """Hold the deployment's lock, so that two commands don't start it twice."""
    with (home.path / "deployment.lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), False)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another command is starting the deployment in {home.path}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
