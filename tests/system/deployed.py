"""A deployment in a directory of its own, driven by the `motley` command and looked at through its data.

With `MOTLEY_TEST_DATABASE=postgresql` every deployment has a PostgreSQL server of its own instead of SQLite.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.deployment_processes import marked_processes
from cli.deployment_record import DeploymentRecord, read_record
from cli.deployment_settings import DATABASE_VARIABLE
from scripts.regions.airflow import home_of_process
from stages.contract import StageName, StageResult, StageStatus
from stages.home import ENGINES_PYTHON_VARIABLE, MotleyHome
from stages.launch import StageAttempt, all_attempts
from storage.layout import Split
from storage.policies import head_version, resolve_policy
from storage.rollouts import read_family
from storage.runs import read_iteration
from storage.store import Store, open_store
from tests.system.postgres import postgres_server

needs_engines = pytest.mark.skipif(ENGINES_PYTHON_VARIABLE not in os.environ, reason=f"needs {ENGINES_PYTHON_VARIABLE}")
"""Stages of a deployment run in the engines' environment, which `make test-system` names."""

REPOSITORY = Path(__file__).parents[2]

#: Measured rates and times, and predictions made from them, differ from run to run; everything else must not.
_TIMED_METRICS = frozenset({
    "tokens_per_s", "overhead_fraction", "publish_lag_s", "balance_drift", "producer_samples_per_s",
    "consumer_samples_per_s", "predicted_producer_samples_per_s", "predicted_consumer_samples_per_s",
    "turn_wait_s", "generation_idle_s", "training_idle_s",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deployment:
    """One home directory with what runs for it."""

    home: MotleyHome
    database_url: str | None = None
    """Metadata database; None is SQLite."""

    def motley(self, *arguments: str, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, check=False,
            timeout=timeout_s, cwd=self.home.path,
        )  # fmt: skip

    def command(self, *arguments: str) -> list[str]:
        """Return the argument list of a `motley` command."""
        return [sys.executable, "-m", "cli", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The environment that such a command needs."""
        database = {} if self.database_url is None else {DATABASE_VARIABLE: self.database_url}
        return {**os.environ, "MOTLEY_HOME": str(self.home.path), "PYTHONPATH": str(REPOSITORY), **database}

    @property
    def record(self) -> DeploymentRecord:
        """The deployment's record."""
        record = read_record(self.home.deployment_file)
        assert record is not None
        return record

    @property
    def store(self) -> Store:
        """The deployment's own store."""
        return open_store(str(self.home.store_dir))

    def attempts(self, stage: str, iteration: int) -> list[StageAttempt]:
        """Return the attempts at a stage of an iteration."""
        return [
            attempt
            for state_dir in [*(self.home.path / "state").glob("*"), *(self.home.path / "workers").glob("*/state/*")]
            for attempt in all_attempts(state_dir)
            if attempt.folder.parts[-4:-2] == (f"{iteration:06d}", attempt.folder.parts[-3])
            and attempt.folder.parts[-3].split(".")[0] == stage
        ]

    def stage_processes(self) -> list[psutil.Process]:
        """Return the stage processes (no engines)."""
        return [p for p in marked_processes(self.record.id, part="stage") if "--request" in command_of(p)]

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes."""
        return [
            p for p in marked_processes(self.record.id, part="stage") if "stages.engines" in " ".join(command_of(p))
        ]

    def everything(self) -> list[psutil.Process]:
        """Return every process of the deployment."""
        return marked_processes(self.record.id)

    def machine(self, name: str) -> list[psutil.Process]:
        """Return what a loss of power would end on a machine: its worker, task and stage processes and engines."""
        mark = str(self.home.worker_home(name).path)
        worker = next(worker.process for worker in self.record.workers if worker.machine == name)
        assert worker is not None
        return [psutil.Process(worker.pid), *(p for p in self.everything() if home_of_process(p) == mark)]


@contextmanager
def deployment(path: Path, *, database_url: str | None = None) -> Iterator[Deployment]:
    """Give a deployment that is down; whatever it started is ended afterwards, and nothing may be left."""
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if database_url is None and os.environ.get("MOTLEY_TEST_DATABASE") == "postgresql":
            database_url = stack.enter_context(postgres_server(path.parent / f"{path.name}-database")).url
        found = Deployment(MotleyHome(path), database_url)
        try:
            yield found
        finally:
            if found.home.deployment_file.exists():
                done = found.motley("down")
                assert done.returncode == 0, done.stderr
                assert found.everything() == []


def kill(processes: list[psutil.Process]) -> int:
    """Kill processes with SIGKILL; return how many that were."""
    count = 0
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
            count += 1
        except psutil.NoSuchProcess:
            continue
    return count


def until(condition: Callable[[], Any], what: str, timeout_s: float = 600.0, every_s: float = 0.02) -> Any:
    """Return the condition's first true value, looked at every so often."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(every_s)
    raise AssertionError(f"{what} did not come within {timeout_s:.0f} s")


def snapshot(store: Store, run: str, iterations: int) -> dict[str, Any]:
    """Return what must be equal between an interrupted run and one that was not."""
    head = head_version(store, run)
    return {
        "head": head,
        "weights": [resolve_policy(store, run, version).weights_hash for version in range((head or 0) + 1)],
        "rollouts": [
            read_family(store, run, k, "rollouts", columns=("row_id", "completion_token_ids", "seed")).to_pylist()
            for k in range(iterations)
        ],
        "rewards": [
            read_family(store, run, k, "reward", columns=("row_id", "reward", "reward_status")).to_pylist()
            for k in range(iterations)
        ],
        "evaluation": read_family(
            store, run, iterations, "reward", columns=("row_id", "reward"), split=Split.EVAL
        ).to_pylist(),
        "metrics": [
            {name: value for name, value in read_iteration(store, run, k).metrics.items() if name not in _TIMED_METRICS}
            for k in range(iterations)
        ],
    }


def trainings(found: Deployment, iteration: int) -> int:
    """Return how many attempts trained an iteration to the end, as against finding it trained."""
    results = [attempt.result() for attempt in found.attempts(StageName.TRAIN.value, iteration)]
    return sum(1 for r in results if isinstance(r, StageResult) and r.status is StageStatus.OK and not r.reused)


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON document of a command that succeeded."""
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process, empty if it is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
