"""`deployment.json`: what `motley up` started, enough to find every process again and to start the same again."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cli.errors import DeploymentError

COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")
"""The processes of an Airflow, by the names of their commands."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ComponentProcess(_Document):
    """One started component."""

    name: str
    """Component."""
    pid: int
    """Process id; its session has the same number."""
    started_at: float
    """Start time of the process as the system tells it, Unix time: a recycled pid has another one."""


class Worker(_Document):
    """An Edge worker on this computer: the work of one machine of a cluster file."""

    machine: str
    """Name in the cluster file; also the worker's name in Airflow."""
    queue: str
    """Airflow queue."""
    region: str
    """Region."""
    gpu: str
    """GPU type."""
    count: int
    """GPUs."""
    concurrency: int = Field(ge=1)
    """Tasks at a time."""
    roots: tuple[str, ...]
    """Object-store roots in which it looks for the records of runs."""
    process: ComponentProcess | None = None
    """What runs; None before the first start."""


class Ports(_Document):
    """Ports on the loopback interface."""

    api: int
    """UI and REST."""
    worker_logs: int
    """Logs of local workers."""
    trigger_logs: int
    """Logs of the triggerer."""


class DeploymentRecord(_Document):
    """The document."""

    format: Literal["motley.deployment/1"] = "motley.deployment/1"
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    """Marks every process of this deployment through the environment."""
    ports: Ports
    """Ports."""
    jwt_secret: str = Field(default_factory=lambda: secrets.token_hex(32))
    """Signs tokens between Airflow's processes."""
    api_secret: str = Field(default_factory=lambda: secrets.token_hex(32))
    """Signs sessions of the UI."""
    airflow_python: str
    """Interpreter of Airflow."""
    engines_python: str
    """Interpreter of stage processes and engines."""
    database_url: str | None = None
    """SQLAlchemy URL of the metadata database; None is a SQLite file in the home directory."""
    workers: tuple[Worker, ...] = ()
    """Edge workers on this computer; without any, tasks run in the scheduler's local executor."""
    processes: tuple[ComponentProcess, ...] = ()
    """What was started; empty when the deployment is down."""

    @property
    def has_workers(self) -> bool:
        """Whether tasks go to Edge workers by queue, as against the local executor."""
        return bool(self.workers)

    @property
    def url(self) -> str:
        """Address of the UI."""
        return f"http://127.0.0.1:{self.ports.api}"


def read_record(file: Path) -> DeploymentRecord | None:
    """Return the record, None if there is none.

    Raises:
        DeploymentError: the file is no deployment record.
    """
    try:
        return DeploymentRecord.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise DeploymentError(
            f"{file} can't be read as a deployment record ({_first_line(error)}); move it away and run `motley up` "
            "again."
        ) from error


def write_record(file: Path, record: DeploymentRecord) -> None:
    """Write the record, readable by its owner only: it holds secrets."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    temporary.touch(mode=0o600)
    temporary.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
