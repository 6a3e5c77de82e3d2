from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from cli import deployment_start
from cli.deployment_record import ComponentProcess, DeploymentRecord, Ports, read_record, write_record
from cli.deployment_settings import START_TIMEOUT_VARIABLE, start_timeout_s
from cli.deployment_start import becomes_healthy, bring_up, log_file, wait_until_healthy
from cli.errors import DeploymentError, InputError, PortInUseError
from stages.home import MotleyHome


def record(ports: Ports, *processes: ComponentProcess) -> DeploymentRecord:
    return DeploymentRecord(ports=ports, airflow_python="python", engines_python="python", processes=processes)


def own_process(name: str) -> ComponentProcess:
    own = psutil.Process()
    return ComponentProcess(name=name, pid=own.pid, started_at=own.create_time())


def gone_process(name: str) -> ComponentProcess:
    return ComponentProcess(name=name, pid=2**22 - 1, started_at=0.0)


PORTS = Ports(api=1, worker_logs=2, trigger_logs=3)


def test_ports_of_the_last_life_are_taken_again_and_all_differ() -> None:
    first = deployment_start._choose_ports(None, None)
    again = deployment_start._choose_ports(first, None)
    assert (again.api, again.worker_logs) == (first.api, first.worker_logs)
    assert len({again.api, again.worker_logs, again.trigger_logs}) == 3


def test_port_that_was_asked_for_is_taken_or_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = int(server.getsockname()[1])
        with pytest.raises(PortInUseError, match=f"port {taken} on 127.0.0.1 is in use"):
            deployment_start._choose_ports(None, taken)
    assert deployment_start._choose_ports(None, taken).api == taken


def test_deployment_with_a_dead_part_does_not_become_healthy() -> None:
    parts = [
        own_process("api-server"),
        own_process("scheduler"),
        own_process("dag-processor"),
        gone_process("triggerer"),
    ]
    assert not becomes_healthy(record(PORTS, *parts))


def test_deployment_that_runs_but_stays_silent_does_not_become_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_start, "PATIENCE_S", -1.0)
    parts = [own_process(name) for name in ("api-server", "scheduler", "dag-processor", "triggerer")]
    assert not becomes_healthy(record(PORTS, *parts))


def test_component_that_ended_while_starting_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    home = MotleyHome(tmp_path)
    log = log_file(home, "scheduler")
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nsqlite3.OperationalError: disk I/O error\n")
    with pytest.raises(DeploymentError, match=r"(?s)Airflow's scheduler ended while starting; .*disk I/O error"):
        wait_until_healthy(record(PORTS, gone_process("scheduler")), home, lambda _: None)


def test_wait_for_a_busy_machine_can_be_set_and_a_wrong_one_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(START_TIMEOUT_VARIABLE, raising=False)
    assert start_timeout_s(120.0) == 120.0
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "900")
    assert start_timeout_s(120.0) == 900.0
    for wrong in ("soon", "0", "-1", "inf", "nan", ""):
        monkeypatch.setenv(START_TIMEOUT_VARIABLE, wrong)
        with pytest.raises(InputError, match="positive number of seconds"):
            bring_up(MotleyHome(tmp_path / "home"), port=None, environment={}, report=lambda _: None)
    assert not (tmp_path / "home" / "deployment.json").exists()


def test_component_that_stays_silent_is_named_with_the_wait_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "0.01")
    parts = [own_process(name) for name in ("api-server", "scheduler", "dag-processor", "triggerer")]
    monkeypatch.setattr(deployment_start, "end_airflow", lambda *_, **__: None)
    remedy = f"within 0 s; .* or on a busy machine set {START_TIMEOUT_VARIABLE} higher"
    with pytest.raises(DeploymentError, match=remedy):
        wait_until_healthy(record(PORTS, *parts), MotleyHome(tmp_path), lambda _: None)


def test_component_without_log_is_still_named(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"(?s)Airflow's triggerer ended while starting; .*\(no log\)"):
        wait_until_healthy(record(PORTS, gone_process("triggerer")), MotleyHome(tmp_path), lambda _: None)


def test_failed_start_leaves_the_record_without_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a refused start may look like a running deployment."""
    home = MotleyHome(tmp_path)
    before = record(PORTS, gone_process("scheduler"))
    write_record(home.deployment_file, before)
    (home.airflow_dir).mkdir()
    (home.airflow_dir / "airflow.cfg").touch()
    monkeypatch.setattr(deployment_start, "airflow_python", lambda _: ("python", "3.3.2"))
    monkeypatch.setattr(deployment_start, "engines_python", lambda *_: "python")
    with pytest.raises(DeploymentError, match="holds files of another Airflow"):
        bring_up(home, port=None, environment={}, report=lambda _: None)
    found = read_record(home.deployment_file)
    assert found is not None
    assert deployment_start.running_components(found) == []
