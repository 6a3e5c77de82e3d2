from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cli.deployment_record import DeploymentRecord, Ports, read_record, write_record
from cli.deployment_settings import airflow_environment
from cli.errors import DeploymentError
from stages.home import MotleyHome

PORTS = Ports(api=8080, worker_logs=8793, trigger_logs=8794)


def record() -> DeploymentRecord:
    return DeploymentRecord(ports=PORTS, airflow_python="/a/python", engines_python="/e/python")


def test_record_written_and_read_is_equal_and_private(tmp_path: Path) -> None:
    file, written = tmp_path / "deployment.json", record()
    write_record(file, written)
    assert read_record(file) == written
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_two_records_share_no_secret() -> None:
    first, second = record(), record()
    assert len({first.id, second.id, first.jwt_secret, second.jwt_secret, first.api_secret, second.api_secret}) == 6


def test_missing_record_is_none_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deployment.json"
    assert read_record(file) is None
    file.write_text("{}")
    with pytest.raises(DeploymentError, match=r"can't be read as a deployment record .*; move it away"):
        read_record(file)


def test_airflow_environment_drops_another_airflows_settings_and_stays_on_loopback(tmp_path: Path) -> None:
    caller = {"PATH": "/bin", "AIRFLOW_HOME": "/other", "AIRFLOW__CORE__FERNET_KEY": "x"}
    found = airflow_environment(record(), MotleyHome(tmp_path), caller)
    assert found["AIRFLOW_HOME"] == str(tmp_path / "airflow")
    assert "AIRFLOW__CORE__FERNET_KEY" not in found
    assert (found["PATH"], found["AIRFLOW__API__HOST"]) == ("/bin", "127.0.0.1")
    assert found["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] == "http://127.0.0.1:8080/execution/"
    assert (found["MOTLEY_HOME"], found["MOTLEY_PART"]) == (str(tmp_path), "airflow")
    assert found["MOTLEY_ENGINES_PYTHON"] == "/e/python"
