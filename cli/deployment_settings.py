"""How the embedded Airflow is configured: database, executor, loopback, and the pace of the scheduler.

Everything goes through the environment of its processes; no configuration file is edited. Settings of another Airflow
in the caller's environment are dropped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import cli
from cli.deployment_processes import AIRFLOW_PART
from cli.deployment_record import DeploymentRecord, Worker
from cli.errors import InputError
from stages.home import (
    DEPLOYMENT_VARIABLE,
    ENGINES_PYTHON_VARIABLE,
    HOME_VARIABLE,
    PART_VARIABLE,
    WORKER_VARIABLE,
    MotleyHome,
)
from stages.settings import SETTINGS_VARIABLE

#: Repository (or installation) that holds `cli/`.
REPOSITORY = Path(cli.__file__).resolve().parent.parent

DAGS_DIR = REPOSITORY / "dags"
"""Folder of the DAG files."""

# Stages follow each other within seconds on a machine whose cores the engines use, so the scheduler looks often but not
# all the time; deaths of local processes are noticed in tens of seconds, not in minutes.
_PACE = {
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "5",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "20",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "120",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "10",
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": "86400",
    "AIRFLOW__SCHEDULER__ENABLE_TRACEMALLOC": "False",
    # A task that skips or fails is reported when its process is seen to be gone; the supervisor looks this often (s).
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": "60",
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
    "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "AIRFLOW__DAG_PROCESSOR__PRINT_STATS_INTERVAL": "300",
}

_FIXED = {
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__PARALLELISM": "8",
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    "AIRFLOW__CORE__DEFAULT_TASK_WEIGHT_RULE": "absolute",
    # Slots of the pool that all tasks share; read when the database is made.
    "AIRFLOW__CORE__DEFAULT_POOL_TASK_SLOT_COUNT": "1024",
    "AIRFLOW__API__HOST": "127.0.0.1",
    # A worker's request is signed for this many seconds; a server on a busy machine can take longer than the default of
    # 10 to look at it, and the worker ends when it is refused (seen with Airflow 3.3.2, edge3 5.1.0).
    "AIRFLOW__API_AUTH__JWT_LEEWAY": "300",
    # A task may wait in its queue for longer than the default of 10 minutes.
    "AIRFLOW__EXECUTION_API__JWT_EXPIRATION_TIME": "86400",
    "AIRFLOW__API__WORKERS": "1",
    "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
    "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    # Otherwise process titles overwrite the environment, in which `motley down` finds the deployment's mark.
    "SPT_NOENV": "1",
}


_SQLITE = {
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS": "plugins.sqlite_wait.CONNECT_ARGS",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS_ASYNC": "plugins.sqlite_wait.CONNECT_ARGS",
}


LOCAL_EXECUTOR = "LocalExecutor"
"""Tasks run beside the scheduler: the default, for one machine."""

EDGE_EXECUTOR = "airflow.providers.edge3.executors.EdgeExecutor"
"""Tasks go to the worker of their queue, which fetches them over HTTP. It is the only executor then: a list of two
would have to be the same in every process that reads a DAG, and no row of a run belongs beside the scheduler."""

START_TIMEOUT_VARIABLE = "MOTLEY_START_TIMEOUT_S"
"""Environment variable with the longest wait for components and workers to come up, seconds."""

DATABASE_VARIABLE = "MOTLEY_DATABASE_URL"
"""Environment variable with the metadata database of a deployment that starts for the first time. Unlike an argument,
its password is in no list of processes."""

# A worker is missed after five heartbeats; then another one may take its name.
WORKER_HEARTBEAT_S = 10

_EDGE = {
    "AIRFLOW__EDGE__API_ENABLED": "True",
    "AIRFLOW__EDGE__JOB_POLL_INTERVAL": "1",
    "AIRFLOW__EDGE__HEARTBEAT_INTERVAL": str(WORKER_HEARTBEAT_S),
    "AIRFLOW__EDGE__DRAIN_TIMEOUT_SEC": "600",
    "AIRFLOW__EDGE__EXTENDED_SYSTEM_INFO_FUNCTION": "plugins.worker_info.machine_facts",
    # All tasks of all workers together. Each worker has its own limit; a smaller one here would hold up a stage of many
    # machines, and a training gang of more machines than this could never meet.
    "AIRFLOW__CORE__PARALLELISM": "1024",
    # Tasks that one look of the scheduler may queue: all rows of a stage at once.
    "AIRFLOW__SCHEDULER__MAX_TIS_PER_QUERY": "256",
}


def edge_environment(url: str) -> dict[str, str]:
    """Return the settings that Airflow's processes and its workers share when there are workers."""
    return {
        **_EDGE,
        "AIRFLOW__CORE__EXECUTOR": EDGE_EXECUTOR,
        "AIRFLOW__EDGE__API_URL": f"{url}/edge_worker/v1/rpcapi",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
    }


def without_airflow(caller: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the settings of any Airflow and without the address of its database."""
    return {
        name: value
        for name, value in caller.items()
        if not name.startswith(("AIRFLOW_", "_AIRFLOW_")) and name != DATABASE_VARIABLE
    }


def worker_environment(
    worker: Worker, home: MotleyHome, caller: Mapping[str, str], *, url: str, jwt_secret: str
) -> dict[str, str]:
    """Return the environment of an Edge worker: no database, a home and logs of its own.

    Args:
        worker: The worker.
        home: Its own home directory.
        caller: Environment of the command.
        url: Address of the API server.
        jwt_secret: Signs what worker and server say to each other.
    """
    facts = worker.model_dump(mode="json", include={"machine", "region", "gpu", "count", "roots"})
    return {
        **without_airflow(caller),
        **_FIXED,
        **_PACE,
        **edge_environment(url),
        "AIRFLOW_HOME": str(home.airflow_dir),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS_DIR),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(home.airflow_dir / "plugins"),
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home.airflow_dir / "logs"),
        "AIRFLOW__API_AUTH__JWT_SECRET": jwt_secret,
        HOME_VARIABLE: str(home.path),
        WORKER_VARIABLE: json.dumps(facts, sort_keys=True),
        PART_VARIABLE: AIRFLOW_PART,
    }


def airflow_environment(record: DeploymentRecord, home: MotleyHome, caller: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Airflow's processes.

    Args:
        record: The deployment.
        home: Its local files.
        caller: Environment of the command, which is inherited apart from other Airflows' settings.
    """
    executor = edge_environment(record.url) if record.has_workers else {"AIRFLOW__CORE__EXECUTOR": LOCAL_EXECUTOR}
    database = _SQLITE if record.database_url is None else {}
    return {
        **without_airflow(caller),
        **_FIXED,
        **_PACE,
        **executor,
        **database,
        "AIRFLOW_HOME": str(home.airflow_dir),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS_DIR),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(home.airflow_dir / "plugins"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{record.url}/execution/",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": record.database_url or f"sqlite:///{home.airflow_dir / 'airflow.db'}",
        "AIRFLOW__API__PORT": str(record.ports.api),
        "AIRFLOW__API__BASE_URL": record.url,
        "AIRFLOW__API__SECRET_KEY": record.api_secret,
        "AIRFLOW__API_AUTH__JWT_SECRET": record.jwt_secret,
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home.airflow_dir / "logs"),
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(record.ports.worker_logs),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(record.ports.trigger_logs),
        HOME_VARIABLE: str(home.path),
        ENGINES_PYTHON_VARIABLE: record.engines_python,
        DEPLOYMENT_VARIABLE: record.id,
        PART_VARIABLE: AIRFLOW_PART,
    }


def named_settings(home: MotleyHome, caller: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that leads a worker of this computer, whose home is another one, to the settings.

    Args:
        home: Home of the deployment.
        caller: Environment of the command, which may name the file already.
    """
    is_named = SETTINGS_VARIABLE in caller or not home.settings_file.exists()
    return {} if is_named else {SETTINGS_VARIABLE: str(home.settings_file)}


def start_timeout_s(default_s: float) -> float:
    """Return the longest wait for something that starts, seconds.

    Args:
        default_s: The wait where the environment names none.

    Raises:
        InputError: the environment names no positive number.
    """
    text = os.environ.get(START_TIMEOUT_VARIABLE, str(default_s))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise InputError(f"{START_TIMEOUT_VARIABLE} is {text!r}, but it is a positive number of seconds; correct it.")
    return seconds
