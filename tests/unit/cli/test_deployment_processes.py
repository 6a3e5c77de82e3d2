from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

from cli.deployment_processes import (
    component_process,
    end_airflow,
    end_processes,
    end_stages,
    listens,
    marked_processes,
    running_components,
)
from cli.deployment_record import ComponentProcess, DeploymentRecord, Ports

Start = Callable[..., "subprocess.Popen[bytes]"]
READY = "import sys; print('up', flush=True); import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def start(mark: str) -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def begin(part: str, code: str = READY, **changes: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "MOTLEY_DEPLOYMENT": mark, "MOTLEY_PART": part} | changes
        child = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def record_of(mark: str, *children: subprocess.Popen[bytes]) -> DeploymentRecord:
    return DeploymentRecord(
        id=mark,
        ports=Ports(api=1, worker_logs=2, trigger_logs=3),
        airflow_python="python",
        engines_python="python",
        processes=tuple(
            ComponentProcess(name="scheduler", pid=child.pid, started_at=psutil.Process(child.pid).create_time())
            for child in children
        ),
    )


def test_marked_processes_are_found_by_deployment_and_part(mark: str, start: Start) -> None:
    airflow, stage = start("airflow"), start("stage")
    start("stage", MOTLEY_DEPLOYMENT="another")
    assert {p.pid for p in marked_processes(mark)} == {airflow.pid, stage.pid}
    assert [p.pid for p in marked_processes(mark, part="stage")] == [stage.pid]


def test_own_process_is_never_among_the_marked(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process().environ()
    found = marked_processes(own.get("MOTLEY_DEPLOYMENT", mark))
    assert os.getpid() not in {p.pid for p in found}


def test_recycled_pid_is_not_the_component(mark: str, start: Start) -> None:
    child = start("airflow")
    component = record_of(mark, child).processes[0]
    assert component_process(component) is not None
    assert component_process(component.model_copy(update={"started_at": component.started_at - 60.0})) is None


SERVER = (
    "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
    "print(s.getsockname()[1], flush=True); time.sleep(600)"
)


def test_component_listens_on_its_port_also_through_a_child(mark: str, start: Start) -> None:
    code = f"import subprocess, sys; print('up', flush=True); subprocess.run([sys.executable, '-c', {SERVER!r}])"
    parent, other = start("airflow", code), start("airflow")
    assert parent.stdout is not None
    port = int(parent.stdout.readline())
    assert listens(record_of(mark, parent).processes[0], port)
    assert not listens(record_of(mark, other).processes[0], port)
    assert not listens(record_of(mark, parent).processes[0].model_copy(update={"started_at": 0.0}), port)
    end_stages(record_of(mark), grace_s=1.0)


def test_dead_component_does_not_run(mark: str, start: Start) -> None:
    child = start("airflow")
    record = record_of(mark, child)
    assert running_components(record) == list(record.processes)
    child.kill()
    child.wait()
    assert running_components(record) == []


def test_process_that_ignores_sigterm_is_killed(start: Start) -> None:
    child = start("airflow", STUBBORN)
    assert end_processes([psutil.Process(child.pid)], grace_s=0.2) == []
    assert not psutil.pid_exists(child.pid)


def test_ending_airflow_reaches_what_no_record_knows_and_leaves_stages(mark: str, start: Start) -> None:
    scheduler, orphan, stage = start("airflow"), start("airflow"), start("stage")
    assert end_airflow(record_of(mark, scheduler), grace_s=0.0) == []
    assert [psutil.pid_exists(child.pid) for child in (scheduler, orphan, stage)] == [False, False, True]


def test_ending_stages_ends_all_the_rest_and_is_idempotent(mark: str, start: Start) -> None:
    stage = start("stage", STUBBORN)
    record = record_of(mark)
    assert end_stages(record, grace_s=0.2) == []
    assert not psutil.pid_exists(stage.pid)
    assert end_stages(record, grace_s=0.2) == []
